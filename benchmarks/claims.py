"""Trains the models of the papers' claims on Wikipedia at the sizes of one GPU, and compares their perplexities.

    python -m benchmarks.claims OUT --wikipedia wikipedia                      # every claim of claims.yaml
    python -m benchmarks.claims OUT --claims masked_learning --of flash flash-no_clip
    python -m benchmarks.claims --table

`claims.yaml` is the plan: the systems of each claim, what changes in them, tokens, lengths, rates and seeds. The folder
of `--wikipedia` has train.jsonl, more.jsonl, valid.jsonl, with `{"text": …}` lines, and sentencepiece.model. The files
may be packed as .jsonl.xz, but a packed file is one shard: a run reads one file to its end, then the next. Plain files
are cut into shards of 16 MB, which a run mixes.

The text is tokenized once, in OUT. Trainings run as `flash-tf train` in folders of OUT: one at a time where a claim is
timed, else several. A run's row is written when it ends. Then its checkpoints are removed, unless the claim keeps them.
A run that is complete in OUT is not trained again, and one that was stopped goes on, so the command may be stopped and
started again. A row names the commit at hand: other code or another plan needs another OUT.
"""

import argparse
import itertools
import math
import shutil
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import claims_plan, device, in_parallel, result_files
from benchmarks.claims_plan import CLAIMS, Case
from benchmarks.in_parallel import Training
from flash_tf.registry import hint
from flash_tf.training.progress import Progress

AT_ONCE = 4  # trainings of a claim that is not timed: in 80 GB of a GPU, up to 16 GB each
GROUP = ("device", "claim", "task", "length", "tokens")  # of the rows that a table compares
LINE = ("system", "change", "learning_rate")
COLUMNS = ("system", "parameters", "rate", "seeds", "perplexity", "spread", "gap", "gap/spread")
COLUMNS += ("ktok/s", "hours", "speed-up")
WIDTHS = (42, 13, 9, 7, 12, 9, 9, 18, 9, 8, 10)


def main(arguments: list[str] | None = None) -> int:
    """Trains what the file lacks, and prints a table for each claim, task and length; 1 if a run failed."""
    args = _checked(result_files.parse(_parser(), arguments))
    status, rows = in_parallel.measured(args, "claims", _measure)
    print(as_text([row for row in rows if row["claim"] in args.claims and _asked(row, args)]))
    return status


def _measure(args, progress):
    where = in_parallel.device_name()
    results = result_files.Results(args, "claims", device=where, packages=("tensorflow", "keras", "numpy"))
    complete = True
    for claim in args.claims:
        progress.line(f"{claim}: {CLAIMS[claim]['says']}, on {where}")
        cases = [case for case in claims_plan.planned(claim) if _asked(case._asdict(), args)]
        if "choose" in CLAIMS[claim]:
            short = [case for case in claims_plan.choosing(claim) if _pair(case) in {*map(_pair, cases)}]
            complete &= all(map(in_parallel.diverged, _train(short, args, results, progress, keep=False)))
            diverged = {(*_pair(case), case.rate) for case in short if in_parallel.diverged(training(case, args))}
            rates = _chosen(claim, [*results.before, *results.rows], diverged)
            for task, system in sorted({*map(_pair, cases)} - rates.keys()):
                progress.line(f"{system}, {task}: not trained, because a run that chooses its rate has failed")
            cases = [case._replace(rate=rates[_pair(case)]) for case in cases if _pair(case) in rates]
        complete &= not _train(cases, args, results, progress, CLAIMS[claim].get("keeps_checkpoints", False))
    return int(not complete)


def _asked(about, args):
    """Whether the arguments ask for a case, or for a row, by what it is about."""
    name = "-".join(filter(None, (about["system"], about["change"])))
    chosen = ((name, args.of), (about["task"], args.tasks), (about["length"], args.lengths))
    return all(not values or value in values for value, values in chosen)


def _pair(case):
    """What has a learning rate of its own."""
    return case.task, case.system


def _train(cases, args, results, progress, keep):
    """Trains the cases that the file lacks, and adds a row for each that ends; returns the runs that failed."""
    runs = {training(case, args): case for case in cases}
    runs = {run: known for run, case in runs.items() if not results.has(**(known := about(case, run)))}
    if not runs:
        return []
    plan = CLAIMS[cases[0].claim]
    at_once = args.parallel or (1 if plan.get("timed") else AT_ONCE)
    tokenize(runs, cases[0].claim, progress)
    progress.line(f"{len(runs)} trainings, {at_once} at a time")

    fresh = {run for run in runs if not run.folder.exists()}  # the others may have begun beside other trainings

    def add(run):
        timed = bool(plan.get("timed")) and at_once == 1 and run in fresh
        results.add({**runs[run], **_found(run, timed), "parallel": at_once})
        if not keep:
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)

    ended = in_parallel.train(list(runs), at_once, progress, add)
    return [run for run, complete in zip(runs, ended, strict=True) if not complete]


def about(case: Case, run: Training) -> dict[str, Any]:
    """What a row is about. `length` and `tokens` are the plan's; a change may have another n, batch or rate."""
    from flash_tf import config as configs

    config = configs.load(run.config, run.overrides)
    return {
        **{name: getattr(case, name) for name in ("claim", "task", "system", "change", "config", "length", "tokens")},
        "n": config.data.sequence_length,
        "tokens_per_step": config.train.tokens_per_step,
        "steps": config.train.steps,
        "seed": config.train.seed,
        "learning_rate": config.optimizer.learning_rate,
    }


def training(case: Case, args: argparse.Namespace) -> Training:
    """The run of a case."""
    source = {"type": "text_files", "documents": "key", "key": "text"}
    source["train"] = [text_file(args.wikipedia, name) for name in CLAIMS[case.claim]["files"]]
    source["validation"] = text_file(args.wikipedia, "valid")
    data = {"data.source": source, "data.tokenizer": tokenizer_file(args.wikipedia)}
    data["data.cache"] = str(Path(args.out, "tokens"))
    overrides = claims_plan.as_overrides({**claims_plan.options(case, args.steps), **data})
    return Training(case.config, Path(args.out, case.folder), (*overrides, *args.set))


def text_file(folder: str, name: str) -> str:
    """A file of text, the plain one if both are there."""
    plain = Path(folder, f"{name}.jsonl")
    return str(plain if plain.exists() else plain.with_suffix(".jsonl.xz"))


def tokenizer_file(folder: str) -> str:
    """The file of the vocabulary."""
    return str(Path(folder, "sentencepiece.model"))


def tokenize(runs: Iterable[Training], claim: str, progress: Progress) -> None:
    """Tokenizes the text of a claim's runs, so that none waits for it.

    Raises:
      ValueError: A claim reads no token twice, and a run of it would. Or a file is missing.
    """
    from flash_tf import config as configs
    from flash_tf.data import tokenizers
    from flash_tf.training import inputs

    shards: dict[tuple, list[int]] = {}
    for run in runs:
        config = configs.load(run.config, run.overrides)
        if (files := tuple(config.data.source["train"])) not in shards:
            tokenizer = tokenizers.load(config.data.tokenizer, config.model["vocabulary_size"])
            train, validation = (
                inputs.make_cache(config, str(run.folder), tokenizer, split, progress.tokenized)
                for split in ("train", "validation")
            )
            for cache in (validation, train):
                shards[files] = [len(cache.get(index).tokens) for index in range(len(cache.shards))]
        n, needed = config.data.sequence_length, config.train.steps * config.train.tokens_per_step
        there = sum(tokens // n * n for tokens in shards[files])
        if CLAIMS[claim].get("once") and needed > there:
            raise ValueError(f"{claim} reads no token twice: at n = {n:,} it needs {needed:,} tokens, got {there:,}")


def _found(run, timed):
    scores, described = in_parallel.evaluations(run), in_parallel.described(run)
    return {
        "parameters": described["parameters"],
        "state_bytes": described["decode_state_bytes"],
        "perplexity": scores[-1]["perplexity"],
        "curve": [[score["step"], score["perplexity"]] for score in scores],
        "tokens_per_second": in_parallel.tokens_per_second(run) if timed else None,
        "seconds": in_parallel.seconds(run),
    }


def _chosen(claim, rows, diverged=()):
    """The best rate of each task and system whose short runs have all ended; `diverged`, (task, system, rate), have."""
    tokens, found = CLAIMS[claim]["choose"]["tokens"], {}
    for row in rows:
        if (row["claim"], row["tokens"]) == (claim, tokens):
            found.setdefault((row["task"], row["system"]), {})[row["learning_rate"]] = row["perplexity"]
    for task, system, rate in diverged:
        found.setdefault((task, system), {}).setdefault(rate, math.inf)
    tried = {*CLAIMS[claim]["rates"]}
    best = {pair: min(rates, key=rates.get) for pair, rates in found.items() if rates.keys() >= tried}
    return {pair: rate for pair, rate in best.items() if found[pair][rate] < math.inf}


def as_text(rows: list[dict]) -> str:
    """A table for each device, claim, task, length and number of tokens, in the order of the plan.

    Gaps are to the first line. The spread is the standard deviation over seeds, and the gap is divided by the first
    line's. The speed-up is over the first line too: in the time to the worst final perplexity of the table.
    """
    tables, key = [], lambda row: tuple(row[name] for name in GROUP)  # noqa: E731
    for group in dict.fromkeys(map(key, rows)):
        where, claim, task, length, tokens = group
        lines: dict[tuple, dict[int, dict]] = {}
        for row in sorted((row for row in rows if key(row) == group), key=_place):
            lines.setdefault(tuple(row[name] for name in LINE), {})[row["seed"]] = row  # the newest
        heading = f"{claim}, {task}, n = {length:,}, {tokens / 1e6:g} M tokens, on {where}"
        tables.append("\n".join([heading, device.table_line(COLUMNS, WIDTHS), *_lines([*lines.values()])]))
    return "\n\n".join(tables)


def _place(row):
    """The row's place in its table: by the plan, and by the rate."""
    name = row["system"] if row["change"] is None else f"{row['system']}-{row['change']}"
    known = claims_plan.names(row["claim"]) if row["claim"] in CLAIMS else []
    return known.index(name) if name in known else len(known), row["learning_rate"]


def _lines(lines: list[dict[int, dict]]) -> Iterable[str]:
    """The lines of a table, from the rows of each by seed. Times are of the first seed."""
    values = [[row["perplexity"] for row in rows.values()] for rows in lines]
    means, firsts = [statistics.fmean(of_seeds) for of_seeds in values], [rows[min(rows)] for rows in lines]
    spreads = [statistics.stdev(of_seeds) if len(of_seeds) > 1 else None for of_seeds in values]
    worst = max(row["perplexity"] for row in firsts)
    times = [seconds_to(row, worst) for row in firsts]
    for i, row in enumerate(firsts):
        name = row["system"] if row["change"] is None else f"{row['system']}, {row['change']}"
        cells = [name, f"{row['parameters']:,}", f"{row['learning_rate']:g}", len(lines[i]), f"{means[i]:.2f}"]
        cells += [_formatted(spreads[i], ".2f"), *(_gap(means[i] - means[0], spreads[0]) if i else (None, None))]
        rate = row["tokens_per_second"]
        hours = rate and row["steps"] * row["tokens_per_step"] / rate / 3600
        cells += [_formatted(rate and rate / 1e3, ".1f"), _formatted(hours, ".3f")]
        cells.append(_formatted(times[0] / times[i] if times[0] and times[i] else None, ".2f"))
        yield device.table_line(cells, WIDTHS)


def _formatted(value, form):
    return None if value is None else format(value, form)


def _gap(gap, spread):
    """The cells of a gap: itself, and in units of the spread. Below two it is no more than chance."""
    if not spread:
        return f"{gap:+.2f}", None
    return f"{gap:+.2f}", f"{gap / spread:+.1f}{', within' if abs(gap) < 2 * spread else ''}"


def seconds_to(row: dict, perplexity: float) -> float | None:
    """The seconds of steps until a run first has a perplexity, at its median rate; None if it is not timed.

    Between two evaluations, the logarithm of the perplexity falls evenly.
    """
    if row["tokens_per_second"] is None:
        return None
    before, each = None, row["tokens_per_step"] / row["tokens_per_second"]
    for step, value in row["curve"]:
        if value <= perplexity:
            if before is None:
                return step * each
            (start, high), drop = before, math.log(before[1]) - math.log(value)
            return (start + (step - start) * (math.log(high) - math.log(perplexity)) / drop) * each
        before = step, value
    return None


def _checked(args):
    """The arguments. Overrides and other steps make the rows a variant."""
    if not args.table and args.out is None:
        raise ValueError("OUT is needed, but for --table")
    in_parallel.check(args, "steps", "lengths")
    _known("claim", args.claims or [], CLAIMS)
    args.claims = args.claims or list(CLAIMS)
    _known("variant", args.of or [], list(dict.fromkeys(itertools.chain(*map(claims_plan.names, args.claims)))))
    if not args.table:
        _check_files(args)
    args.variant = result_files.variant(args, *([f"{args.steps} steps"] if args.steps else []))
    return args


def _check_files(args):
    names = sorted({name for claim in args.claims for name in CLAIMS[claim]["files"]} | {"valid"})
    for path in (*(text_file(args.wikipedia, name) for name in names), tokenizer_file(args.wikipedia)):
        if not Path(path).exists():
            raise ValueError(f"--wikipedia {args.wikipedia} needs {path}, and there is none")


def _known(kind, given, known):
    if unknown := [name for name in given if name not in known]:
        near = hint(unknown[0], known) or "."
        raise ValueError(f"no {kind} is called {unknown[0]!r}{near} There are: {', '.join(known)}")


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", metavar="OUT", help="the folder for the runs and the tokens")
    parser.add_argument("--wikipedia", default="wikipedia", metavar="DIR", help="the text (default wikipedia)")
    parser.add_argument("--claims", nargs="+", metavar="CLAIM", help=f"default: all, {', '.join(CLAIMS)}")
    parser.add_argument("--of", nargs="+", metavar="VARIANT", help="systems, or SYSTEM-CHANGE (default: all)")
    parser.add_argument("--tasks", nargs="+", choices=("lm", "mlm"), help="default: the plan's")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="of the plan's (default: all)")
    parser.add_argument("--steps", type=int, metavar="N", help="of every training; rows are then a variant")
    in_parallel.add_options(parser, None, f"1 for timed claims, else {AT_ONCE}")
    return parser


if __name__ == "__main__":
    device.program(main)
