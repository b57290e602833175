"""Trains the rows of TransNormer's Table 6 on long texts, as the Long-Range Arena does: accuracy and steps per second.

    python -m benchmarks.long_range OUT                            # ListOps, made by a generator
    python -m benchmarks.long_range OUT --task text --text reviews
    python -m benchmarks.long_range OUT --task arena_retrieval     # the arena's own files, in lra_release/
    python -m benchmarks.long_range --table

`long_range.yaml` has the systems and the tasks. A task is a config of `configs/long_range`: the arena's, with its
files, lengths, batches and steps, or with smaller ones for minutes on a GPU. The folder of `--text` has train.jsonl and
validation.jsonl with `{"text": …, "label": "neg" or "pos"}` lines; they are read byte by byte.

The systems run as `flash-tf train` in folders of OUT. A row has the accuracy on the validation examples after the last
step, and the rate of the steps. Tables show the rate of a run that had the device to itself, as with `--parallel 1`. A
row is written when its run ends. A run that is complete in OUT is not trained again, so the command may be stopped and
started again. A row names the commit at hand: other code or options need another OUT.
"""

import argparse
import json
from pathlib import Path

import yaml

from benchmarks import device, in_parallel, result_files
from benchmarks.in_parallel import Training
from benchmarks.systems import OF_LENGTH
from flash_tf.registry import hint

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
MEASURED = ("task", "system", "seed")  # what a row is about
FILES = ("train", "validation")  # of --text
COLUMNS = ("system", "parameters", "accuracy", "of", "steps/s")
WIDTHS = (24, 12, 10, 8, 9)


def main(arguments: list[str] | None = None) -> int:
    """Trains what the file lacks, and prints a table for each device, task and seed; 1 if a run failed."""
    args = _checked(result_files.parse(_parser(), arguments))
    status, rows = in_parallel.measured(args, "long_range", _measure)
    rows = [row for row in rows if row["system"] in args.systems and (not args.task or row["task"] == args.task)]
    rows = list({tuple(row[name] for name in ("device", *MEASURED)): row for row in rows}.values())
    print(as_text(rows) or "no row of this task is there")
    return status


def _measure(args, progress):
    where = in_parallel.device_name()
    results = result_files.Results(args, "long_range", device=where, packages=("tensorflow", "keras", "numpy"))
    cases = [{"task": args.task, "system": system, "seed": args.seed} for system in args.systems]
    runs = {training(case, args): case for case in cases if not results.has(**case)}
    progress.line(f"{args.task}: {len(runs)} systems, {args.parallel} at a time, on {where}")

    # Only a run that this call trains from its first step has `--parallel` beside it.
    fresh = {run for run in runs if not run.folder.exists()}

    def add(run):
        results.add({**runs[run], **_found(run), "parallel": args.parallel if run in fresh else None})

    return int(not all(in_parallel.train(list(runs), args.parallel, progress, add)))


def training(case: dict, args: argparse.Namespace) -> Training:
    """The run of a system, for the values under `MEASURED`."""
    from flash_tf import config
    from flash_tf.models.language_model import listed

    task = TABLE["tasks"][case["task"]]
    options = {**task.get("set", {}), "train.seed": case["seed"]}
    if case["task"] == "text":
        options["data.source"] = {"type": "example_files"} | {name: _file(args.text, name) for name in FILES}
    given = [*_overrides(options), *args.set]
    length = config.load(task["config"], given).data.sequence_length
    model = {**TABLE["model"], **TABLE["systems"][case["system"]]}
    mixers = [{**mixer, **{k: length for k in OF_LENGTH if k in mixer}} for mixer in listed(model["mixer"])]
    options |= {f"model.{name}": value for name, value in {**model, "mixer": mixers}.items()}
    options["evaluation.every"] = None  # at the end alone
    folder = Path(args.out, "-".join(str(case[name]) for name in MEASURED))
    return Training(task["config"], folder, (*_overrides(options), *args.set))


def _overrides(options):
    return [f"{name}={json.dumps(value)}" for name, value in options.items()]


def _file(folder, name):
    return str(Path(folder, f"{name}.jsonl"))


def _found(run):
    from flash_tf import config

    experiment, score = config.load(run.config, run.overrides), in_parallel.evaluations(run)[-1]
    rate = in_parallel.tokens_per_second(run)
    return {
        "length": experiment.data.sequence_length,
        "tokens_per_step": experiment.train.tokens_per_step,
        "steps": score["step"],
        "learning_rate": experiment.optimizer.learning_rate,
        "parameters": in_parallel.described(run)["parameters"],
        "accuracy": score["accuracy"],
        "held_out": score["labels"],
        "steps_per_second": rate and rate / experiment.train.tokens_per_step,
        "seconds": in_parallel.seconds(run),
    }


def as_text(rows: list[dict]) -> str:
    """A table for each device, task and seed, in the order of the paper's rows."""
    tables, order = [], list(TABLE["systems"])
    for about in dict.fromkeys((row["device"], row["task"], row["seed"]) for row in rows):
        own = [row for row in rows if (row["device"], row["task"], row["seed"]) == about]
        first = own[0]
        said = (
            f"{about[1]}, length {first['length']:,}, {first['steps']:,} steps of {first['tokens_per_step']:,} tokens, "
        )
        lines = [f"{said}seed {about[2]}, on {about[0]}", device.table_line(COLUMNS, WIDTHS)]
        tables.append("\n".join([*lines, *map(_line, sorted(own, key=lambda row: order.index(row["system"])))]))
    return "\n\n".join(tables)


def _line(row):
    alone = row["parallel"] == 1 and row["steps_per_second"] is not None
    rate = f"{row['steps_per_second']:.1f}" if alone else None
    cells = (row["system"], f"{row['parameters']:,}", f"{row['accuracy']:.1%}", f"{row['held_out']:,}", rate)
    return device.table_line(cells, WIDTHS)


def _checked(args):
    """The arguments. Overrides make the rows a variant."""
    if not args.table and args.out is None:
        raise ValueError("OUT is needed, but for --table")
    if not args.table and (args.task == "text") != (args.text is not None):
        raise ValueError("--text DIR and --task text belong together")
    if not args.table and args.text is not None:
        for name in FILES:
            if not Path(_file(args.text, name)).is_file():
                raise ValueError(f"--text {args.text} needs {_file(args.text, name)}, and there is none")
    if unknown := [name for name in args.systems if name not in TABLE["systems"]]:
        near = hint(unknown[0], TABLE["systems"]) or "."
        raise ValueError(f"no system is called {unknown[0]!r}{near} There are: {', '.join(TABLE['systems'])}")
    in_parallel.check(args)
    args.task = args.task or (None if args.table else "list_ops")
    args.variant = result_files.variant(args)
    return args


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_range", description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", metavar="OUT", help="the folder for the runs")
    tasks = list(TABLE["tasks"])
    parser.add_argument("--task", choices=tasks, metavar="TASK", help=f"default list_ops; {', '.join(tasks[1:])}")
    parser.add_argument("--text", metavar="DIR", help="the files of the task text")
    parser.add_argument("--systems", nargs="+", default=list(TABLE["systems"]), metavar="SYSTEM", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    in_parallel.add_options(parser, 1, "1")
    return parser


if __name__ == "__main__":
    device.program(main)
