"""Times `flash-tf train` as a user runs it: tokens per second of its progress line, and seconds until the first step.

    python -m benchmarks.train_command OUT --configs wikipedia_lm/flash wikipedia_mlm/flash --lengths 512 8192
    python -m benchmarks.train_command OUT --configs wikipedia_lm/flash --lengths 8192 --again

Each config is trained at each length by a process of its own, one after the other, on its own data; run it where the
config's files are. The process ends after `--steps` steps and five loops, before an evaluation. A loop of steps has one
rate; the first loop, which compiles, and the last do not count, and the median of the others is the rate. Programs that
XLA keeps begin in an empty folder, so each start is a first one. `--again` then starts the same command a second time:
it goes on from its checkpoint, with its programs. Lowered kernels (docs/layers.md) stay where they are in all starts.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

from benchmarks import device, in_parallel, result_files
from flash_tf.training.progress import Progress, duration

COLUMNS = ("config", "n", "ktok/s", "first step, s", "again, s")
WIDTHS = (36, 8, 9, 15, 10)
LATER = 3  # steps of a second start
LOOPS = 5  # the fewest that give a rate: the first and the last do not count, and the second is a slow one


def main(arguments: list[str] | None = None) -> int:
    """Times each config at each length; returns 1 if a training failed."""
    args = _checked(result_files.parse(_parser(), arguments))
    with device.libraries_in_log() as console:
        progress, where = Progress(console), in_parallel.device_name()
        results = result_files.Results(args, "train_command", device=where, packages=("tensorflow", "jax", "keras"))
        cases = {
            case: Path(args.out, f"{case[0].replace('/', '-')}-{case[1]}")
            for case in itertools.product(args.configs, args.lengths)
        }
        if there := [str(folder) for folder in cases.values() if folder.exists()]:
            raise ValueError(f"{there[0]} is there already: OUT must be another folder")
        for (config, n), folder in cases.items():
            progress.line(f"flash-tf train {config}, {args.tokens // n} x {n:,} tokens a step")
            if (found := _timed(config, n, folder, args, progress)) is not None:
                results.add({"config": config, "n": n, "tokens_per_step": args.tokens, **found})
    print(device.table_line(COLUMNS, WIDTHS))
    for row in results.rows:
        rate, first, again = (
            row.get(name) for name in ("tokens_per_second", "seconds_to_first_step", "seconds_to_first_step_again")
        )
        cells = (row["config"], row["n"], f"{rate / 1e3:.1f}", f"{first:.1f}", again and f"{again:.1f}")
        print(device.table_line(cells, WIDTHS))
    return int(len(results.rows) < len(cases))


def _timed(config, n, folder, args, progress):
    """The figures of a config at a length, or None if it failed."""
    sizes = [f"data.sequence_length={n}", f"train.tokens_per_step={args.tokens}", "evaluation.every=null", *args.set]
    options = [text for override in sizes for text in ("--set", override)]
    command = in_parallel.Command(
        ("train", config, "--model-dir", str(folder / "run"), *options), folder / "output.log"
    )
    first = _until(command, folder, args.steps, signal.SIGTERM if args.again else signal.SIGKILL, progress, LOOPS)
    if first is None:
        return None
    records = _records(folder)
    rates = _rates(records)
    if len(rates) < LOOPS:
        progress.line(f"{command} ended after {len(rates)} loops; a rate needs {LOOPS}: train.steps must be more")
        return None
    found = {
        "tokens_per_second": statistics.median(rates[1:-1]),
        "tokens_per_second_of_loops": rates,
        "seconds_to_first_step": first,
        "loss": records[-1]["loss"],
        "steps": records[-1]["step"],
    }
    if args.again:
        again = _until(command, folder, len(records) + LATER, signal.SIGKILL, progress)
        if again is None:
            return None
        found["seconds_to_first_step_again"] = again
    return found


def _until(command, folder, steps, number, progress, loops=0):
    """Runs a command until the run has some steps in some loops, then sends it a signal.

    Returns:
      The seconds to its first step, or None if it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ending = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the child ends too
    before, start, first = len(_records(folder)), time.perf_counter(), None
    with command.log.open("a") as log:
        child = subprocess.Popen(
            [*in_parallel.CHILD, *command.arguments],
            env={**os.environ, "TF_XLA_FLAGS": _kept(folder)},  # noqa: TID251  TensorFlow has no other way
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while child.poll() is None:
            records = _records(folder)
            passed, done = time.perf_counter() - start, len(records)
            if done >= steps and len(_rates(records)) >= loops:
                break
            first = first or (passed if done > before else None)
            progress.status(f"step {done:,} of {steps:,}", duration(passed))
            time.sleep(0.05)
        first = first or time.perf_counter() - start
        ended = child.poll()
        if ended is None:
            child.send_signal(number)
            child.wait()
    finally:
        child.kill()
        child.wait()
        signal.signal(signal.SIGTERM, ending)
        progress.clear()
    if ended:
        last = command.log.read_text("utf-8", "replace").splitlines()[-1:]
        progress.line(f"{command} failed with status {ended}: {''.join(last)}")
    return None if ended else first


def _kept(folder):
    (folder / "programs").mkdir(exist_ok=True)
    ours = f"--tf_xla_persistent_cache_directory={folder}/programs --tf_xla_persistent_cache_device_types=GPU"
    return f"{os.environ.get('TF_XLA_FLAGS', '')} {ours}"  # noqa: TID251


def _records(folder):
    file = folder / "run" / "metrics.jsonl"
    whole = file.read_text("utf-8").rpartition("\n")[0] if file.exists() else ""  # the last line may be half written
    return [json.loads(line) for line in whole.splitlines()]


def _rates(records):
    """The rate of each loop."""
    return [rate for rate, _ in itertools.groupby(record["tokens_per_second"] for record in records)]


def _checked(args):
    """The arguments. Overrides make the rows a variant."""
    for n in args.lengths:
        device.batch_size(n, args.tokens)
    if args.steps < 3:
        raise ValueError(f"--steps must be 3 or more, got {args.steps}")
    args.variant = result_files.variant(args)
    return args


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_command", description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT", help="a new folder for the runs")
    parser.add_argument("--configs", nargs="+", required=True, metavar="CONFIG")
    device.takes_sizes(parser, (8192,))
    parser.add_argument("--steps", type=int, default=100, help="the fewest after which a training ends (default 100)")
    parser.add_argument("--again", action="store_true", help="time a second start too, which goes on from the first")
    result_files.add_overrides(parser)
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
