"""Trains every system at one small size for one pass over WikiText-2, at several learning rates: their perplexities.

    python -m benchmarks.one_pass OUT --text wikitext-2
    python -m benchmarks.one_pass --table

The models are the configs of `wikitext2_lm` and `wikitext2_mlm`, causal and masked. They run as `flash-tf train`,
several at a time, in folders of OUT; all have the same text, order and steps. The folder of `--text` has the set's
train.txt and valid.txt; the tokenizer is trained once for each of the two. A run that is complete in OUT is not trained
again, so the command may be stopped and started again. `benchmarks.systems --table` has the best of the rates.
"""

import argparse
from pathlib import Path

from benchmarks import device, in_parallel, result_files
from benchmarks.in_parallel import Training
from flash_tf import model_zoo

STEPS = 1441  # of 2,048 tokens: one pass with a vocabulary of 8,000
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
NAME, NUMBER = 32, 10  # widths of columns


def main(arguments: list[str] | None = None) -> int:
    """Trains what the file lacks, and prints the table; 1 if a run failed, unless by diverging."""
    args = _checked(result_files.parse(_parser(), arguments))
    status, rows = in_parallel.measured(args, "one_pass", _measure)
    print(as_text(rows))
    return status


def configs() -> list[str]:
    """The configs of all systems, causal ones first."""
    from flash_tf import config

    return [name for name in config.names() if name.partition("/")[0] in model_zoo.FOLDERS]


def _measure(args, progress):
    where = in_parallel.device_name()
    results = result_files.Results(args, "one_pass", device=where, packages=("tensorflow", "keras", "numpy"))
    asked = {"steps": args.steps, "seed": args.seed}
    runs = _runs(args)
    runs = {run: case for run, case in runs.items() if not results.has(**case, **asked)}
    progress.line(f"{len(runs)} trainings, {args.steps:,} steps each, on {where}")

    def add(run):
        found = {"perplexity": None} if in_parallel.diverged(run) else in_parallel.evaluations(run)[-1]
        results.add({**runs[run], **asked, **found, "parallel": args.parallel})

    firsts = _firsts(args, {case["config"].partition("/")[0] for case in runs.values()})
    made = in_parallel.train(firsts, args.parallel, progress)
    if not all(there or in_parallel.diverged(first) for first, there in zip(firsts, made, strict=True)):
        return 1  # without a tokenizer the others of its folder would fail too
    waiting = [run for run in runs if not in_parallel.diverged(run)]
    done = dict(zip(waiting, in_parallel.train(waiting, args.parallel, progress, add), strict=True))
    lacking = [run for run in runs if not done.get(run)]
    for run in filter(in_parallel.diverged, lacking):
        add(run)
    return int(not all(map(in_parallel.diverged, lacking)))


def _runs(args):
    """Each training and what it is about. The first of a folder makes the tokenizer of all the others in it."""
    firsts = {first.config.partition("/")[0]: first for first in _firsts(args, model_zoo.FOLDERS)}
    found = {}
    for rate in args.rates:
        for name in args.of:
            first = firsts[name.partition("/")[0]]
            run = training(name, rate, args, first.folder)
            found[first if run.folder == first.folder else run] = {"config": name, "learning_rate": rate}
    return found


def _firsts(args, folders):
    names = [next((name for name in args.of if name.startswith(f"{folder}/")), None) for folder in folders]
    return [training(name, args.rates[0], args, "null") for name in names if name]


def training(name: str, rate: float, args: argparse.Namespace, tokenizer: str | Path) -> Training:
    """The run of a config at a rate, with the tokenizer of a folder, or "null" for one of its own."""
    options = {
        "data.source.train": f"{args.text}/train.txt",
        "data.source.validation": f"{args.text}/valid.txt",
        "data.tokenizer": tokenizer,
        "optimizer.learning_rate": f"{rate:g}",
        "train.steps": args.steps,
        "train.checkpoint_every": args.steps,
        "train.seed": args.seed,
    }
    overrides = [f"{key}={value}" for key, value in options.items()]
    folder = Path(args.out, f"{name.replace('/', '-')}-{rate:g}-{args.seed}")
    return Training(name, folder, (*overrides, *args.set))


def best(rows: list[dict]) -> dict[str, float]:
    """The lowest perplexity of each config over the rates and seeds of its newest rows."""
    found: dict[str, float] = {}
    for row in result_files.newest(rows, "config", "learning_rate", "seed", "steps"):
        if row["perplexity"] is not None:
            found[row["config"]] = min(row["perplexity"], found.get(row["config"], row["perplexity"]))
    return found


def as_text(rows: list[dict]) -> str:
    """A table for each device, folder, number of steps and seed: a line for each config, a column for each rate."""
    tables = []
    about = lambda row: (row["device"], row["config"].partition("/")[0], row["steps"], row["seed"])  # noqa: E731
    for which in dict.fromkeys(map(about, rows)):
        own = {(row["config"], row["learning_rate"]): row["perplexity"] for row in rows if about(row) == which}
        rates = sorted({rate for _, rate in own})
        widths = (NAME, *[NUMBER] * len(rates))
        lines = [
            "{}, {}, {:,} steps, seed {}".format(*which),
            device.table_line(("config", *(f"{r:g}" for r in rates)), widths),
        ]
        for name in dict.fromkeys(name for name, _ in own):
            cells = [_cell(own, (name, rate)) for rate in rates]
            lines.append(device.table_line((name.partition("/")[2], *cells), widths))
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _cell(found, case):
    if case not in found:
        return None
    return "diverged" if found[case] is None else f"{found[case]:.2f}"


def _checked(args):
    """The arguments. Overrides make the rows a variant."""
    if not args.table and (args.out is None or args.text is None):
        raise ValueError("OUT and --text are needed, but for --table")
    args.of = args.of or configs()
    if unknown := [name for name in args.of if name not in configs()]:
        raise ValueError(f"--of takes configs of {' and '.join(model_zoo.FOLDERS)}, got {unknown[0]!r}")
    if min(args.rates) <= 0:
        raise ValueError(f"--rates must be above 0, got {min(args.rates):g}")
    if not args.table and (lacking := [n for n in ("train.txt", "valid.txt") if not Path(args.text, n).is_file()]):
        raise ValueError(f"--text {args.text} needs {lacking[0]}, and there is none")
    in_parallel.check(args, "steps")
    args.variant = result_files.variant(args, *([] if args.steps == STEPS else [f"{args.steps} steps"]))
    return args


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_pass", description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", metavar="OUT", help="the folder for the runs")
    parser.add_argument("--text", metavar="DIR", help="has WikiText-2's train.txt and valid.txt")
    parser.add_argument("--of", nargs="+", metavar="CONFIG", help="default: every config of a system")
    said = ", ".join(f"{rate:g}" for rate in RATES)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, metavar="RATE", help=f"default {said}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of 2,048 tokens (default {STEPS:,}, one pass)")
    parser.add_argument("--seed", type=int, default=0)
    in_parallel.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
