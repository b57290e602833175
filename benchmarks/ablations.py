"""Trains TransNormer's ablations, its Tables 1, 3 and 8 to 12, at a small size on WikiText-2: their perplexities.

    python -m benchmarks.ablations OUT --text wikitext-2
    python -m benchmarks.ablations --table

The models are the configs of `configs/transnormer_ablations` and those that they change: masked language models, here
with 12 layers of width 192 and a vocabulary of 8,000. They run as `flash-tf train`, several at a time, in folders of
OUT; all have the same text, order, masks, steps and learning rate, and the tokenizer of the first. The folder of
`--text` has the set's train.txt and valid.txt. A run that is complete in OUT is not trained again, so the command may
be stopped and started again. The paper trained models of width 768 on WikiText-103 for 50,000 steps.
"""

import argparse
import itertools
import re
from pathlib import Path

from benchmarks import device, in_parallel, result_files
from benchmarks.in_parallel import Training

FOLDER = "transnormer_ablations"
SIZE = {
    "model.width": 192,
    "model.vocabulary_size": 8000,
    "data.sequence_length": 256,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 300,
    "train.tokens_per_step": 16_384,
    "train.steps_per_loop": 50,
    "train.precision": "float32",
    "train.accumulate": 1,
    "evaluation.every": "null",
}
BASES = ("one_plus_elu", "transnormer_t1", "transnormer_t2")  # of the folder wikitext103_mlm
HIDDEN = 512  # of a GLU: 2,048 at width 768
PAPER = re.compile(r"Paper \(TransNormer, Tables? ([\d, and]+)\), validation perplexity ([\d.]+)")
COLUMNS, WIDTHS = ("config", "table", "perplexity", "the paper's", "parameters"), (30, 8, 12, 13, 12)


def main(arguments: list[str] | None = None) -> int:
    """Trains what the file lacks, and prints the table; 1 if a run failed."""
    args = _checked(result_files.parse(_parser(), arguments))
    status, rows = in_parallel.measured(args, "ablations", _measure)
    print(as_text(rows))
    return status


def systems() -> list[str]:
    """The names of the configs: the models that are changed, each followed by its changes."""
    from flash_tf import config

    names = [name for name in config.names() if name.startswith(f"{FOLDER}/")]
    by_base = itertools.groupby(sorted(names, key=base), base)
    return [name for one, changes in by_base for name in (one, *sorted(changes))]


def base(name: str) -> str:
    """The config that an ablation changes."""
    return re.search(r"^base: (\S+)", _text(name), re.MULTILINE)[1]


def paper(name: str) -> tuple[str | None, float | None]:
    """The paper's table and its validation perplexity, as the config's comment has them."""
    found = PAPER.search(_text(name))
    return (found[1], float(found[2])) if found else (None, None)


def _text(name):
    from flash_tf import config

    return (config.FOLDER / f"{name}.yaml").read_text("utf-8")


def _measure(args, progress):
    where = in_parallel.device_name()
    results = result_files.Results(args, "ablations", device=where, packages=("tensorflow", "keras", "numpy"))
    asked = {"steps": args.steps, "seed": args.seed}
    first, *others = systems()
    tokenizer = training(first, args, "null")
    runs = {first: tokenizer, **{name: training(name, args, tokenizer.folder) for name in others}}
    runs = {name: run for name, run in runs.items() if _asked(name, args.of) and not results.has(config=name, **asked)}
    progress.line(f"{len(runs)} models, {args.steps:,} steps each, on {where}")
    if not runs:
        return 0
    if not all(in_parallel.train([tokenizer], 1, progress)):
        return 1
    names = {run: name for name, run in runs.items()}

    def add(run):
        score, parameters = in_parallel.evaluations(run)[-1], in_parallel.described(run)["parameters"]
        results.add({"config": names[run], **asked, **score, "parameters": parameters, "parallel": args.parallel})

    return int(not all(in_parallel.train(list(names), args.parallel, progress, add)))


def _asked(name, bases):
    changed = base(name) if name.startswith(FOLDER) else name
    return changed.partition("/")[2] in bases


def training(name: str, args: argparse.Namespace, tokenizer: str | Path) -> Training:
    """The run of a config at the small size, with the tokenizer of a folder, or "null" for one of its own."""
    from flash_tf import config

    files = f"train: {args.text}/train.txt, validation: {args.text}/valid.txt"
    size = {**SIZE, "data.source": f"{{type: text_files, {files}, documents: heading}}", "data.tokenizer": tokenizer}
    size |= {"train.seed": args.seed, "train.steps": args.steps, "train.checkpoint_every": args.steps}
    if "hidden" in config.load(name).model["feedforward"]:
        size["model.feedforward.hidden"] = HIDDEN
    overrides = [f"{key}={value}" for key, value in size.items()]
    return Training(name, Path(args.out, f"{name.replace('/', '-')}-{args.seed}"), (*overrides, *args.set))


def as_text(rows: list[dict]) -> str:
    """A table for each device, number of steps and seed: a line for each model, its newest row."""
    tables = []
    for about in dict.fromkeys((row["device"], row["steps"], row["seed"]) for row in rows):
        own = {row["config"]: row for row in rows if (row["device"], row["steps"], row["seed"]) == about}
        heading = "{}, {:,} steps, seed {}".format(*about)
        tables.append("\n".join([heading, device.table_line(COLUMNS, WIDTHS), *map(_line, own.values())]))
    return "\n\n".join(tables)


def _line(row):
    table, theirs = paper(row["config"])
    name = row["config"].removeprefix(f"{FOLDER}/")
    return device.table_line((name, table, f"{row['perplexity']:.1f}", theirs, f"{row['parameters']:,}"), WIDTHS)


def _checked(args):
    """The arguments. Overrides make the rows a variant."""
    if not args.table and (args.out is None or args.text is None):
        raise ValueError("OUT and --text are needed, but for --table")
    in_parallel.check(args, "steps")
    args.variant = result_files.variant(args)
    return args


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablations", description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", metavar="OUT", help="the folder for the runs")
    parser.add_argument("--text", metavar="DIR", help="has WikiText-2's train.txt and valid.txt")
    parser.add_argument("--of", nargs="+", choices=BASES, default=BASES, help="the models and their changes (all)")
    parser.add_argument("--steps", type=int, default=1500, help="of 16,384 tokens (default 1,500, eight passes)")
    parser.add_argument("--seed", type=int, default=0)
    in_parallel.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
