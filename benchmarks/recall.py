"""Trains every causal system on a made-up task of memory, and compares its accuracy with the size of its state.

    python -m benchmarks.recall OUT                              # multi-query associative recall
    python -m benchmarks.recall OUT --length 256 --pairs 16 --examples 128 --widths 64 128
    python -m benchmarks.recall OUT --length 256 --pairs 16 --examples 128 --train-pairs 4 8 16 --steps 16000
    python -m benchmarks.recall OUT --task selective_copying
    python -m benchmarks.recall --table

The systems are the configs of `configs/recall`, at each width and learning rate. They run as `flash-tf train`, several
at a time, in folders of OUT. A row has the scores at each rate on 3,000 validation examples, after the last step; the
table has the best rate, which the same examples choose. A row is written when the runs of all rates have ended. A run
that is complete in OUT is not trained again, so the command may be stopped and started again. A row names the commit at
hand: other code or options need another OUT. Rows of other lengths, pairs, examples a step, steps or widths are other
measurements, and so are rows of models that were trained with several numbers of pairs.
"""

import argparse
import json
from pathlib import Path

from benchmarks import device, in_parallel, result_files
from benchmarks.in_parallel import Training
from benchmarks.systems import OF_LENGTH
from flash_tf.registry import hint

TASKS = {"mqar": "recall/transformer_plus_plus", "selective_copying": "recall/selective_copying_mamba"}
OTHER = ("copying_mamba", "induction_mamba", "selective_copying_mamba")  # whose data differs, not the system
RATES = (1e-3, 3e-3)
WIDTH = 128
MEASURED = ("task", "length", "pairs", "train_pairs", "examples", "steps", "width", "system")  # what a row is about
COLUMNS = ("system", "width", "accuracy", "whole answers", "rate", "parameters", "state bytes", "seconds")
WIDTHS = (24, 7, 10, 15, 8, 12, 13, 9)


def main(arguments: list[str] | None = None) -> int:
    """Trains what the file lacks, and prints a table for each size of the task and width; 1 if a run failed."""
    args = _checked(result_files.parse(_parser(), arguments))
    status, rows = in_parallel.measured(args, "recall", _measure)
    asked = {"task": [args.task], "width": args.widths, "system": args.systems}
    sizes = {name: getattr(args, name) for name in MEASURED[1:-2]}
    asked |= {name: [value] for name, value in sizes.items() if value is not None}
    rows = [row for row in rows if all(not values or row.get(name) in values for name, values in asked.items())]
    print(as_text(list({tuple(row.get(name) for name in ("device", *MEASURED)): row for row in rows}.values())))
    return status


def systems() -> list[str]:
    """The names of the systems, each a config of `configs/recall`."""
    from flash_tf import config

    found = (name.partition("/") for name in config.names())
    return [name for folder, _, name in found if folder == "recall" and name not in OTHER]


def _measure(args, progress):
    where = in_parallel.device_name()
    results = result_files.Results(args, "recall", device=where, packages=("tensorflow", "keras", "numpy"))
    known = systems()
    if unknown := [name for name in args.systems or known if name not in known]:
        near = hint(unknown[0], known) or "."
        raise ValueError(f"no config of recall is called {unknown[0]!r}{near} There are: {', '.join(known)}")
    data = _data(args)
    asked = {"task": args.task, **{name: data[name] for name in MEASURED[1:-2]}, "seed": args.seed}
    rates = [f"{rate:g}" for rate in args.rates]
    cases = [
        {**asked, "width": width, "system": system}
        for width in args.widths or [WIDTH]
        for system in args.systems or known
    ]
    cases = [case for case in cases if not results.has(**case, rates=rates)]
    runs = [[training(case, rate, data["overrides"], args) for rate in args.rates] for case in cases]
    progress.line(f"{len(cases)} systems at {len(rates)} learning rates, on {where}")
    place = {run: i for i, of_rates in enumerate(runs) for run in of_rates}
    left = [len(rates)] * len(cases)

    def add(run):
        i = place[run]
        left[i] -= 1
        if left[i] == 0:
            results.add({**cases[i], **_row(runs[i], rates), "parallel": args.parallel})

    return int(not all(in_parallel.train(list(place), args.parallel, progress, add)))


def _data(args):
    """The values under `MEASURED` but task, width and system; and a config's overrides."""
    from flash_tf import config

    loaded = config.load(TASKS[args.task])
    many = "pairs" if args.task == "mqar" else "tokens"
    source, before = dict(loaded.data.source), loaded.data.sequence_length
    source[many] = source[many] if args.pairs is None else args.pairs
    if args.train_pairs is not None:
        source["train_pairs"] = [*map(int, args.train_pairs.split())]
    length = before if args.length is None else args.length
    source["length"] = length - (0 if args.task == "mqar" else source[many])
    examples = loaded.train.tokens_per_step // before if args.examples is None else args.examples
    steps = loaded.train.steps if args.steps is None else args.steps
    overrides = {
        "data.source": source,
        "data.sequence_length": length,
        "model.vocabulary_size": loaded.model["vocabulary_size"],
        "train.tokens_per_step": examples * length,
        "train.steps": steps,
        "train.checkpoint_every": steps,  # at the end alone
    }
    sizes = {"length": length, "pairs": source[many], "train_pairs": args.train_pairs, "examples": examples}
    return {**sizes, "steps": steps, "overrides": overrides}


def training(case: dict, rate: float, data: dict, args: argparse.Namespace) -> Training:
    """The run of a system at a width and a learning rate."""
    from flash_tf import config
    from flash_tf.models.language_model import listed

    name, width, length = f"recall/{case['system']}", case["width"], case["length"]
    loaded = config.load(name)
    more = {**data, "model.width": width, "optimizer.learning_rate": rate, "train.seed": args.seed}
    more["evaluation.every"] = None
    feedforward, mixer = loaded.model.get("feedforward") or {}, listed(loaded.model["mixer"])[0]
    if "hidden" in feedforward:
        more["model.feedforward.hidden"] = round(feedforward["hidden"] * width / loaded.model["width"])
    more |= {f"model.mixer.{option}": max(length, mixer[option]) for option in OF_LENGTH if option in mixer}
    overrides = [f"{key}={json.dumps(value)}" for key, value in more.items()]
    about = [case[name] for name in MEASURED if case[name] is not None]
    folder = "-".join(map(str, (*about, f"{rate:g}", args.seed))).replace(" ", "_")
    return Training(name, Path(args.out, folder), (*overrides, *args.set))


def _row(runs, rates):
    scores = [in_parallel.evaluations(run)[-1] for run in runs]
    best = max(range(len(runs)), key=lambda i: scores[i]["accuracy"])
    described = in_parallel.described(runs[best])
    return {
        "rates": rates,
        "accuracies": [one["accuracy"] for one in scores],
        "exact_matches": [one["exact_match"] for one in scores],
        "learning_rate": float(rates[best]),
        "accuracy": scores[best]["accuracy"],
        "exact_match": scores[best]["exact_match"],
        "parameters": described["parameters"],
        "state_bytes": described["decode_state_bytes"],
        "seconds": in_parallel.seconds(runs[best]),
    }


def as_text(rows: list[dict]) -> str:
    """A table for each device, length, number of pairs and of examples, and width, the most accurate system first."""
    tables = []
    for about in dict.fromkeys((row["device"], *size(row)) for row in rows):
        own = [row for row in rows if (row["device"], *size(row)) == about]
        lines = [f"{own[0]['task']}, {described(own[0])}, on {about[0]}", device.table_line(COLUMNS, WIDTHS)]
        tables.append("\n".join([*lines, *map(_line, sorted(own, key=lambda row: -row["accuracy"]))]))
    return "\n\n".join(tables)


def size(row: dict) -> tuple:
    """What rows of one table have in common: the values under `MEASURED` but the system."""
    return tuple(row.get(name) for name in MEASURED[:-1])


def described(row: dict, then: str = ", ") -> str:
    """The size of the task in words, `then` between the examples and the training."""
    trained = f", trained with {row['train_pairs'].replace(' ', ', ')} pairs" if row.get("train_pairs") else ""
    size = f"length {row['length']:,}, {row['pairs']} pairs or words{trained}"
    examples = f"{row['examples']} examples a step, " if "examples" in row else ""  # the oldest rows lack them
    return f"{size}{then}{examples}{row['steps']:,} steps"


def _line(row):
    state = None if row["state_bytes"] is None else f"{row['state_bytes']:,}"
    cells = (row["system"], row["width"], f"{row['accuracy']:.1%}", f"{row['exact_match']:.1%}")
    cells += (f"{row['learning_rate']:g}", f"{row['parameters']:,}", state, f"{row['seconds']:.0f}")
    return device.table_line(cells, WIDTHS)


def _checked(args):
    """The arguments. Overrides make the rows a variant."""
    if not args.table and args.out is None:
        raise ValueError("OUT is needed, but for --table")
    in_parallel.check(args, "widths", "length", "pairs", "train_pairs", "examples", "steps")
    if any(override.startswith("train.steps=") for override in args.set):
        raise ValueError("--set train.steps has an option of its own: --steps")
    if args.train_pairs and args.task != "mqar":
        raise ValueError("--train-pairs is an option of mqar")
    args.train_pairs = " ".join(map(str, args.train_pairs)) if args.train_pairs else None
    if min(args.rates) <= 0:
        raise ValueError(f"--rates must be above 0, got {min(args.rates):g}")
    args.widths, args.rates, args.systems = (
        [*dict.fromkeys(given or [])] for given in (args.widths, args.rates, args.systems)
    )
    args.variant = result_files.variant(args)
    return args


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recall", description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", metavar="OUT", help="the folder for the runs")
    parser.add_argument("--task", choices=TASKS, default="mqar", help="default mqar")
    parser.add_argument("--length", type=int, metavar="N", help="words of an example (default: the config's)")
    parser.add_argument("--pairs", type=int, metavar="N", help="pairs, or words to copy (default: the config's)")
    parser.add_argument(
        "--train-pairs", nargs="+", type=int, metavar="N", help="numbers of pairs in training (default: --pairs)"
    )
    parser.add_argument("--examples", type=int, metavar="N", help="examples of a step (default: the config's)")
    parser.add_argument("--steps", type=int, metavar="N", help="of every training (default: the config's)")
    parser.add_argument("--widths", nargs="+", type=int, metavar="N", help=f"of models (default {WIDTH})")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, metavar="RATE", help="default 0.001 0.003")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help="configs of recall (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    in_parallel.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
