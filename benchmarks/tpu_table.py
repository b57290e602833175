"""Compiles the paper's models for a TPU at its context lengths, without a TPU: memory, estimated time, and ratios.

    python -m benchmarks.tpu_table            # compile, then print the table
    python -m benchmarks.tpu_table --table    # print the table of what was compiled

A step has 8,192 tokens, as on one chip in the paper. A row takes minutes. A config that has a row of this commit,
topology and size is not compiled again, so the command may be stopped and started again. Times are not measured: they
are the compiler's estimates. Where it has no estimate for costly operations, the time is a lower bound and marked so.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import multiprocessing
import time
from pathlib import Path

from benchmarks import device as devices
from benchmarks import result_files
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
    args = result_files.parse(_parser(), arguments)
    sizes = {n: devices.batch_size(n, args.tokens) for n in args.lengths or devices.LENGTHS[:5]}
    wanted = [(name, n) for name in args.configs for n in sizes if args.lengths or str(n) in PAPER.get(name, {})]
    if missing := set(args.configs) - {name for name, _ in wanted}:
        raise ValueError(f"the paper has no context lengths for {min(missing)}: give --lengths")
    if not args.table:
        _compile_all(args, wanted, sizes)
    rows = result_files.read(args.results or result_files.path_of("tpu_table"))
    own = (row for row in rows if (row["device"], row["n"] * row["sequences"]) == (args.topology, args.tokens))
    print(as_text(result_files.newest(own, "config", "n")))
    return 0


def _compile_all(args, wanted, sizes):
    with devices.libraries_in_log() as console:
        packages = ("tensorflow", "jax", "libtpu")
        results = result_files.Results(args, "tpu_table", device=args.topology, packages=packages)
        progress = Progress(console)
        for name, n in wanted:
            if not results.has(config=name, n=n, sequences=sizes[n]):
                progress.line(f"{name}, {sizes[n]:,} x {n:,} tokens")
                results.add(_measure(name, n, sizes[n], args.topology))


def _measure(name, n, rows, topology):
    from flash_tf.compiling import tpu

    # Tracing in a process of its own gives all its memory back, which the compiler needs.
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as tracer:
        serialized = tracer.submit(_trace, name, n, rows).result()
    start = time.perf_counter()
    report = tpu.as_dict(tpu.compile_for(serialized, topology))
    return {
        "config": name,
        "n": n,
        "sequences": rows,
        "topology": topology,
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
    experiment = Experiment(*artifact.resolve(config.load(name, overrides)))
    with tracing_for("tpu"):
        return experiment.trace_step(rows, n).serialized


def as_text(rows: list[dict]) -> str:
    """A Markdown table: each model's estimate, the paper's time and HBM at each length, then ratios."""
    lengths = sorted({row["n"] for row in rows})
    found = {(row["config"], row["n"]): row for row in rows}
    lines = ["| model | " + " | ".join(f"n = {n:,}" for n in lengths) + " |", "|---" * (1 + len(lengths)) + "|"]
    line = lambda name, cell: f"| {name} | " + " | ".join(cell(found.get((name, n))) for n in lengths) + " |"  # noqa: E731
    names = sorted(dict.fromkeys(row["config"] for row in rows), key=lambda name: [*PAPER, name].index(name))
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
    """Marks a lower bound: operations without an estimate take more than 1 % of the time at least."""
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
    parser.add_argument("--tokens", type=int, default=8192, help="in a step, all sequences together (default 8,192)")
    parser.add_argument("--topology", default="v4:2x2x1:megacore", help="default: a whole v4 chip")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    devices.program(main)
