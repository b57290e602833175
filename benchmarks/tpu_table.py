"""Compiles the paper's models for a TPU at its context lengths, without a TPU: memory, estimated time, and ratios.

    python -m benchmarks.tpu_table --json benchmarks/results/tpu_v4.json

A step is as large as what one of the paper's chips had, 8,192 tokens. A row takes minutes; rows that the file has are
kept, so that it may be stopped and started again. No time is measured here: all are the compiler's estimates, and
lower bounds, marked so, where it has none for operations of some weight.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import multiprocessing
import time
from pathlib import Path

from benchmarks import device as devices
from flash_tf.training.progress import Progress

PAPER = json.loads(Path(__file__).with_name("paper_step_ms.json").read_text())
CONFIGS = [name for name in PAPER if name != "source"]
BASELINE, LINEAR = "transformer_plus_plus", "flash"
KEPT = (
    *("fits", "problem", "hbm_bytes", "hbm_limit_bytes", "flops", "hbm_traffic_bytes"),
    *("estimated_ms", "roofline_ms", "unestimated_ms"),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    args = _parser().parse_args(arguments)
    sizes = {n: devices.batch_size(n, args.tokens) for n in args.lengths or devices.LENGTHS[:5]}
    wanted = [(name, n) for name in args.configs for n in sizes if args.lengths or str(n) in PAPER.get(name, {})]
    if missing := set(args.configs) - {name for name, _ in wanted}:
        raise ValueError(f"the paper has no context lengths of {min(missing)}: give --lengths")
    before = devices.kept(args.json, args.topology)
    if other := next((tokens for row in before if (tokens := row["n"] * row["sequences"]) != args.tokens), None):
        raise ValueError(f"{args.json} has rows of {other:,} tokens, --tokens is {args.tokens:,}: name another file")
    with devices.libraries_in_log("tpu_table") as console:
        packages = ("tensorflow", "jax", "libtpu")
        results = devices.Results(args, "tpu_table", device=args.topology, packages=packages, rows=before)
        progress = Progress(console)
        for name, n in wanted:
            if not any((row["config"], row["n"]) == (name, n) for row in before):
                progress.line(f"{name}, {sizes[n]:,} x {n:,} tokens")
                results.add(_measure(name, n, sizes[n], args.topology))
    print(as_text(results.rows))
    return 0


def _measure(name, n, rows, topology):
    from flash_tf.compiling import topology as topologies

    # In a process of its own, which gives back all memory: the compiler needs it.
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as tracer:
        serialized = tracer.submit(_trace, name, n, rows).result()
    start = time.perf_counter()
    report = topologies.as_dict(topologies.compile_for(serialized, topology))
    return {
        "config": name,
        "n": n,
        "sequences": rows,
        "topology": topology,
        "commit": devices.commit(),
        "libtpu": importlib.metadata.version("libtpu"),
        "paper_ms": PAPER.get(name, {}).get(str(n)),
        "compile_s": time.perf_counter() - start,
        **{key: report[key] for key in KEPT},
    }


def _trace(name, n, rows):
    from flash_tf.compiling.tpu_worker import end_with_parent

    end_with_parent()
    from flash_tf import config
    from flash_tf.compiling import artifact
    from flash_tf.compiling.programs import Experiment
    from kernels_xla.common.accelerator import tracing_for

    overrides = [f"data.sequence_length={n}", f"train.tokens_per_step={n * rows}"]
    experiment = Experiment(*artifact.prepare(config.load(name, overrides)))
    with tracing_for("tpu"):
        return experiment.trace_step(rows, n).serialized


def as_text(rows: list[dict]) -> str:
    """The rows as a table in Markdown: a model's HBM, estimate and the paper's time at each length, then ratios."""
    lengths = sorted({row["n"] for row in rows})
    found = {(row["config"], row["n"]): row for row in rows}
    lines = ["| model | " + " | ".join(f"n = {n:,}" for n in lengths) + " |", "|---" * (1 + len(lengths)) + "|"]
    line = lambda name, cell: f"| {name} | " + " | ".join(cell(found.get((name, n))) for n in lengths) + " |"  # noqa: E731
    names = list(dict.fromkeys(row["config"] for row in rows))
    lines += [line(name, _cell) for name in names]
    for task in dict.fromkeys(name.partition("/")[0] for name in names):
        pairs = [[found.get((f"{task}/{model}", n)) for model in (BASELINE, LINEAR)] for n in lengths]
        lines.append(f"| {task}: Transformer++ / FLASH | " + " | ".join(map(_ratio, pairs)) + " |")
    return "\n".join(lines)


def _cell(row):
    if row is None:
        return "–"
    if not row["fits"]:
        return "too large" if row["hbm_bytes"] else "refused"
    paper = "" if row["paper_ms"] is None else f" ({row['paper_ms']:g})"
    return f"{_bound(row)}{row['estimated_ms']:.1f}{paper} ms, {row['hbm_bytes'] / 2**30:.1f} GiB"


def _bound(row):
    """A mark for a lower bound: operations without an estimate would take more than 1 % beside the others."""
    return "≥ " if (row["unestimated_ms"] or 0) > 0.01 * row["estimated_ms"] else ""


def _ratio(pair):
    if any(row is None or not row["fits"] for row in pair):
        return "–"
    slow, fast = pair
    paper = "" if None in (slow["paper_ms"], fast["paper_ms"]) else f" ({slow['paper_ms'] / fast['paper_ms']:.2f})"
    return f"{_bound(slow)}{slow['estimated_ms'] / fast['estimated_ms']:.2f}{paper}"


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_table", description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=CONFIGS, metavar="CONFIG", help="default: all of the paper's")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="default: the paper's of each config")
    parser.add_argument("--tokens", type=int, default=8192, help="of all sequences together (default 8,192)")
    parser.add_argument("--topology", default="v4:2x2x1:megacore", help="default: a whole v4 chip")
    devices.takes_result(parser)
    return parser


if __name__ == "__main__":
    devices.program(main)
