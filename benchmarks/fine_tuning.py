"""Fine-tunes three systems on a task of text, from a masked language model and from new weights.

    python -m benchmarks.fine_tuning film_reviews movie_reviews OUT --wikipedia wikipedia
    python -m benchmarks.fine_tuning questions xquad.en.json OUT --wikipedia wikipedia
    python -m benchmarks.fine_tuning questions xquad.en.json OUT --wikipedia wikipedia --size 110m
    python -m benchmarks.fine_tuning film_reviews --table

The masked models of `fine_tuning.yaml` are trained first, on the files of `wikipedia_mlm` and, at the size 110m, on
more.jsonl.xz beside them. Each is fine-tuned at two learning rates with seed 0. The better one on validation is trained
with the other seeds, and the best checkpoints are scored on the test file; so are new weights of the same model with
the same tokenizer. Questions are answered with the `no_answer_threshold` that is best on validation.
`fine_tuning_data.py` splits the data. Trainings run as `flash-tf train`, several at a time, in folders of OUT; what is
complete there is not trained again, so the command may be stopped and started again. Tasks and sizes may share an OUT,
tasks the masked models in it. A row names the commit at hand: other code or data needs another OUT.
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks import device, fine_tuning_data, in_parallel, result_files
from benchmarks.in_parallel import Command, Training
from flash_tf import config_merge
from flash_tf.registry import hint

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
STARTS = ("pretrained", "new")
COLUMNS = ("task", "system", "start", "rate", "parameters", "perplexity", "validation", "test", "spread", "baseline")
COLUMNS += ("has answer", "best f1")
WIDTHS = (14, 23, 12, 8, 12, 12, 12, 8, 8, 10, 12, 9)
METRICS = {task: table["evaluation"]["metric"] for task, table in TABLE["tasks"].items()}  # chooses on validation
SMALL = "11m"
SYSTEMS = list(TABLE["sizes"][SMALL]["systems"])
TESTED = {"film_reviews": "accuracy", "questions": "f1"}  # what the table has of the test file


def main(arguments: list[str] | None = None) -> int:
    """Trains and scores what the file lacks, and prints the table; 1 if a command failed."""
    args = _checked(result_files.parse(_parser(), arguments))
    status, rows = in_parallel.measured(args, "fine_tuning", _measure)
    rows = [row for row in rows if row["task"] == args.task and row.get("size", SMALL) == args.size]
    print(as_text(list({(row["device"], row["system"], row["start"]): row for row in rows}.values())))
    return status


class Case(NamedTuple):
    """A system and the weights that it starts from, "pretrained" or "new"."""

    system: str
    start: str


class Experiment:
    """The configs and runs of a task, all in one folder.

    Args:
      args: The script's arguments.

    Attributes:
      files: The file of each split.
      rates: The learning rates that are tried.
    """

    def __init__(self, args: argparse.Namespace):
        self._args, self.out, self._size = args, Path(args.out, args.size), TABLE["sizes"][args.size]
        self.rates = self._size["rates"]
        self.files = fine_tuning_data.PREPARE[args.task](args.data, self.out / "data" / args.task)

    def pretraining(self, system: str) -> Training:
        """The masked model of a system."""
        folder = Path(self._args.wikipedia)
        source = {"type": "text_files", "documents": "key", "key": "text"}
        source["train"] = [str(folder / f"{name}.jsonl.xz") for name in self._size["files"]]
        source["validation"] = str(folder / "valid.jsonl.xz")
        data = {"source": source, "tokenizer": str(folder / "sentencepiece.model")}
        steps = self._args.pretraining_steps
        overrides = (*self._args.set, *([] if steps is None else [f"train.steps={steps}"]))
        section = config_merge.merge(TABLE["pretraining"], self._size["pretraining"])
        config = self._written(f"pretraining-{system}", system, section, {"data": data})
        return Training(config, self.out / "runs" / f"pretraining-{system}", overrides)

    def fine_tuning(self, case: Case, rate: float, seed: int) -> Training:
        """A run of the task."""
        task, (system, start) = self._args.task, case
        source = {"type": "example_files", **{split: str(self.files[split]) for split in ("train", "validation")}}
        config = self._written(f"{task}-{system}", system, TABLE["tasks"][task], {"data": {"source": source}})
        known = str(Path(self._args.wikipedia) / "sentencepiece.model")
        begin = f"data.tokenizer={known}" if start == "new" else f"init_from={self.pretraining(system).folder}"
        overrides = (begin, f"optimizer.learning_rate={rate}", f"train.seed={seed}", *self._args.set)
        return Training(config, self.out / "runs" / f"{task}-{system}-{start}-{rate:g}-{seed}", overrides)

    def prediction(self, training: Training) -> tuple[Command, Path]:
        """The command that predicts the test file with the best checkpoint of a run, and the file that it writes."""
        folder = self.out / "predictions" / training.folder.name
        arguments = ("predict", str(training.folder), str(self.files["test"]), "--out", str(folder / "test.jsonl"))
        if (threshold := best(training, METRICS[self._args.task]).get("best_f1_threshold")) is not None:
            arguments += (f"--no-answer-threshold={threshold!r}",)
        return Command(arguments, folder.with_name(f"{folder.name}.log")), folder / "test.jsonl"

    def _written(self, name, system, section, more):
        config = TABLE["base"]
        for changes in (section, self._size["base"], more, {"model": self._size["systems"][system]}):
            config = config_merge.merge(config, changes)
        file = self.out / "configs" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(config, sort_keys=False)
        if not file.exists() or file.read_text("utf-8") != text:  # a newer file than a run is another config
            file.write_text(text, "utf-8")
        return str(file)


def _measure(args, progress):
    where = in_parallel.device_name()
    results = result_files.Results(args, "fine_tuning", device=where, packages=("tensorflow", "keras", "numpy"))
    asked = {"task": args.task, "size": args.size, "seeds": list(range(args.seeds))}
    cases = [Case(system, start) for system in args.systems for start in args.starts]
    cases = [c for c in cases if not results.has(**asked, **c._asdict())]
    if not cases:
        return 0
    experiment = Experiment(args)
    ready = _pretrained(experiment, cases, args, progress)
    rates = _chosen(experiment, ready, args, progress)
    tests = _tested(experiment, rates, args, progress)
    for case, scores in tests.items():
        results.add({**asked, **_row(experiment, case, rates[case], scores, args)})
    return int(len(tests) < len(cases))


def _pretrained(experiment, cases, args, progress):
    """The cases whose start there is. New weights need none, so their runs fill the device meanwhile."""
    first = {case: experiment.pretraining(case.system) for case in cases if case.start == "pretrained"}
    new = [case for case in cases if case not in first]
    filling = [experiment.fine_tuning(case, rate, 0) for case in new for rate in experiment.rates]
    progress.line(f"{len(first)} masked models, and {len(filling)} runs of {args.task} from new weights")
    done = in_parallel.train([*first.values(), *filling], args.parallel, progress)
    lacking = {case for case, there in zip(first, done, strict=False) if not there}
    return [case for case in cases if case not in lacking]


def _chosen(experiment, cases, args, progress):
    """For each case the learning rate with the best validation, of the runs that ended."""
    runs = {(case, rate): experiment.fine_tuning(case, rate, 0) for case in cases for rate in experiment.rates}
    progress.line(f"{len(runs)} runs of {args.task} with seed 0")
    done = in_parallel.train(list(runs.values()), args.parallel, progress)
    found: dict[Case, dict[float, float]] = {}
    for ((case, rate), run), there in zip(runs.items(), done, strict=True):
        if there:
            found.setdefault(case, {})[rate] = best(run, METRICS[args.task])[METRICS[args.task]]
    return {case: max(of_rates, key=of_rates.get) for case, of_rates in found.items()}


def _tested(experiment, rates, args, progress):
    """For each case whose seeds are all trained, the test scores of each seed."""
    runs = {(case, s): experiment.fine_tuning(case, rate, s) for case, rate in rates.items() for s in range(args.seeds)}
    progress.line(f"{len(runs)} runs of {args.task} with all seeds, and their predictions")
    done = in_parallel.train(list(runs.values()), args.parallel, progress)
    runs = {key: run for (key, run), there in zip(runs.items(), done, strict=True) if there}
    predictions = {key: experiment.prediction(run) for key, run in runs.items()}
    statuses = in_parallel.run([command for command, _ in predictions.values()], args.parallel, progress)
    found: dict[Case, list[dict]] = {}
    for ((case, _), (_, file)), status in zip(predictions.items(), statuses, strict=True):
        if status == 0:
            found.setdefault(case, []).append(SCORES[args.task](experiment.files["test"], _lines(file)))
    return {case: scores for case, scores in found.items() if len(scores) == args.seeds}


def _row(experiment, case, rate, scores, args):
    seeds = [experiment.fine_tuning(case, rate, seed) for seed in range(args.seeds)]
    other = {r: experiment.fine_tuning(case, r, 0) for r in experiment.rates}
    metric, described = METRICS[args.task], in_parallel.described(seeds[0])
    on_validation = lambda run: best(run, metric)[metric]  # noqa: E731
    started = in_parallel.evaluations(experiment.pretraining(case.system))[-1] if case.start == "pretrained" else {}
    return {
        **case._asdict(),
        "learning_rate": rate,
        "parameters": described["parameters"],
        "n": described["sequence_length"],
        "steps": in_parallel.evaluations(seeds[0])[-1]["step"],
        "metric": TESTED[args.task],
        "chosen_by": metric,
        "test": {name: [one[name] for one in scores] for name in scores[0]},
        "validation": [on_validation(run) for run in seeds],
        "validation_of_rates": {
            f"{rate:g}": on_validation(run) for rate, run in other.items() if in_parallel.evaluations(run)
        },
        "baseline": SCORES[args.task](experiment.files["test"], None),
        "pretraining_steps": started.get("step"),
        "pretraining_perplexity": started.get("perplexity"),
    }


def best(run: Training, metric: str) -> dict[str, float]:
    """The evaluation of a run with the highest value of a metric; the first of several, as its best checkpoint."""
    return max(in_parallel.evaluations(run), key=lambda record: record[metric])


def film_review_scores(test: Path, predictions: list[dict] | None) -> dict[str, float]:
    """The `accuracy` of predictions, or without them the accuracy of always the commonest class."""
    from flash_tf.training import metrics

    labels = [row["label"] for row in _lines(test)]
    commonest = Counter(labels).most_common(1)[0][0]
    found = [commonest] * len(labels) if predictions is None else [row["label"] for row in predictions]
    numbers = [[fine_tuning_data.CLASSES.index(label) for label in column] for column in (labels, found)]
    counts = metrics.confusion(*map(_array, numbers), len(fine_tuning_data.CLASSES))
    return {"accuracy": metrics.accuracy(counts)}


def question_scores(test: Path, predictions: list[dict] | None) -> dict[str, float]:
    """The metrics of `flash_tf.training.metrics.of_questions`, except thresholds, and `answered_*`.

    These are SQuAD's `HasAns_*`: exact match and F1 of the given answers to questions that have one. Without
    predictions all are the scores of a model that never gives an answer.
    """
    import numpy as np

    from flash_tf.data import example_formats
    from flash_tf.training import metrics

    references = [one["answers"]["text"] for one in example_formats.squad(str(test))]
    rows = [{"answer": "", "best_span": "", "score": 0.0}] * len(references) if predictions is None else predictions
    of = lambda texts: np.array([*map(metrics.answer_metrics, texts, references)])  # noqa: E731
    answers, spans, none = of(row["answer"] for row in rows), of(row["best_span"] for row in rows), of([""] * len(rows))
    scores, given = np.array([row["score"] for row in rows]), np.array([row["answer"] != "" for row in rows])
    has_answer = np.array([*map(bool, references)])
    found = metrics.of_questions(scores, given, spans, none, has_answer)
    exact_match, f1 = answers[has_answer].mean(axis=0).tolist()
    kept = {name: value for name, value in found.items() if not name.endswith("_threshold")}
    return {**kept, "answered_exact_match": exact_match, "answered_f1": f1}


SCORES = {"film_reviews": film_review_scores, "questions": question_scores}


def _array(numbers):
    import numpy as np

    return np.array(numbers)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]  # a text may have U+2028


def as_text(rows: list[dict]) -> str:
    """A table of rows: mean of the seeds on validation and test, and the standard deviation of the latter.

    Two more columns are for questions, means on the test file: `has_answer_f1`, and `best_f1` over all thresholds.
    """
    lines = [device.table_line(COLUMNS, WIDTHS)]
    for row in rows:
        test, metric = row["test"][row["metric"]], row["metric"]
        perplexity = row["pretraining_perplexity"]
        cells = (row["task"], row["system"], row["start"], f"{row['learning_rate']:g}", f"{row['parameters']:,}")
        cells += (None if perplexity is None else f"{perplexity:.2f}", f"{statistics.fmean(row['validation']):.1%}")
        spread = f"{statistics.stdev(test):.1%}" if len(test) > 1 else None
        cells += (f"{statistics.fmean(test):.1%}", spread, f"{row['baseline'][metric]:.1%}")
        more = (row["test"].get(name) for name in ("has_answer_f1", "best_f1"))
        cells += tuple(None if values is None else f"{statistics.fmean(values):.1%}" for values in more)
        lines.append(device.table_line(cells, WIDTHS))
    return "\n".join(lines)


def _checked(args):
    """The arguments. Overrides make the rows a variant."""
    if not args.table and (args.data is None or args.out is None):
        raise ValueError("DATA and OUT are needed, but for --table")
    in_parallel.check(args, "seeds", "pretraining_steps")
    if unknown := [name for name in args.systems if name not in SYSTEMS]:
        near = hint(unknown[0], SYSTEMS) or "."
        raise ValueError(f"no system is called {unknown[0]!r}{near} There are: {', '.join(SYSTEMS)}")
    unusual = [] if args.pretraining_steps is None else [f"{args.pretraining_steps} steps of pretraining"]
    args.variant = result_files.variant(args, *unusual)
    return args


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fine_tuning", description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TABLE["tasks"])
    parser.add_argument("data", nargs="?", metavar="DATA", help="the folder with neg and pos, or the file of questions")
    parser.add_argument("out", nargs="?", metavar="OUT", help="the folder for data, runs and predictions")
    parser.add_argument(
        "--wikipedia", default="wikipedia", metavar="DIR", help="the data of configs/wikipedia_mlm (default wikipedia)"
    )
    parser.add_argument("--size", choices=TABLE["sizes"], default=SMALL, help=f"of the models (default {SMALL})")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, metavar="SYSTEM", help="default: all")
    parser.add_argument("--starts", nargs="+", default=STARTS, choices=STARTS, metavar="START", help="default: both")
    parser.add_argument("--seeds", type=int, default=3, help="runs at the better learning rate (default 3)")
    parser.add_argument("--pretraining-steps", type=int, metavar="N", help="default: the table's")
    in_parallel.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
