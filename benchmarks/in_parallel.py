"""Runs commands of `flash-tf` as child processes, several at a time on one device.

A training of a small model leaves most of a GPU idle. Child processes share it, each with the memory that it asks for.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import device, result_files
from flash_tf.training.progress import Progress, duration

CHILD = (sys.executable, "-c", "from flash_tf.cli import program; program()")
POLL = 0.2  # seconds
GRACE = 60  # seconds in which a child that is told to end may save its run
SUCCEEDED = "exit status 0"
DIVERGED = "with a lower optimizer.learning_rate"  # what a run says that has diverged
TOO_SMALL = "the memory here is too small"  # what a command says that lacks memory


class Command(NamedTuple):
    """A command of `flash-tf`.

    Attributes:
      arguments: After `flash-tf`.
      log: The file for its output. The first line is the command, the last one its exit status.
    """

    arguments: tuple[str, ...]
    log: Path

    def __str__(self):
        return shlex.join(["flash-tf", *self.arguments])

    @property
    def done(self) -> bool:
        """Whether the log says that this very command ended well."""
        lines = _lines(self.log)
        return len(lines) > 1 and lines[0] == f"$ {self}" and lines[-1] == SUCCEEDED


class Training(NamedTuple):
    """A run of `flash-tf train`.

    Attributes:
      config: A YAML file or the name of a config.
      folder: The folder of the run. The log stands beside it.
      overrides: For `--set`.
    """

    config: str
    folder: Path
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> Command:
        """The command that trains it."""
        options = [text for override in self.overrides for text in ("--set", override)]
        arguments = ("train", self.config, "--model-dir", str(self.folder), *options)
        return Command(arguments, self.folder.with_name(f"{self.folder.name}.log"))

    @property
    def complete(self) -> bool:
        """Whether the run is there, and was trained by this command from the config file as it is now."""
        config, (_, log) = Path(self.config), self.command
        older = not config.is_file() or (log.exists() and config.stat().st_mtime <= log.stat().st_mtime)
        return older and self.folder.is_dir() and self.command.done


def add_options(parser: argparse.ArgumentParser, default: int | None = 12, said: str = "12") -> None:
    """Adds what a script takes that runs trainings side by side; `said` names the default of `--parallel`."""
    parser.add_argument(
        "--parallel", type=int, default=default, metavar="N", help=f"commands at a time (default {said})"
    )
    parser.add_argument("--table", action="store_true", help="measure nothing")
    result_files.add_overrides(parser)
    result_files.add_options(parser)


def check(args: argparse.Namespace, *counts: str) -> None:
    """Raises a ValueError unless `--parallel` and the named options, numbers or lists or None, are 1 or more."""
    for name in ("parallel", *counts):
        given = getattr(args, name)
        numbers = given if isinstance(given, list) else [] if given is None else [given]
        if min(numbers, default=1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {min(numbers)}")


def measured(
    args: argparse.Namespace, benchmark: str, measure: Callable[[argparse.Namespace, Progress], int]
) -> tuple[int, list[result_files.Row]]:
    """The status of `measure(args, progress)`, 0 with `--table`; and the rows of the benchmark and `args.variant`."""
    status = 0
    if not args.table:
        with device.libraries_in_log() as console:
            status = measure(args, Progress(console))
    rows = result_files.read(args.results or result_files.path_of(benchmark))
    return status, [row for row in rows if row.get("variant") == args.variant]


def train(
    trainings: Sequence[Training],
    at_once: int,
    progress: Progress,
    then: Callable[[Training], None] = lambda training: None,
) -> list[bool]:
    """Trains what is not trained yet; whether each run is now complete. See `run`; `then` gets each complete run."""
    open_ = []
    for one in trainings:
        (then if one.complete else open_.append)(one)
    ended = lambda number, status: None if status else then(open_[number])  # noqa: E731
    statuses = run([one.command for one in open_], at_once, progress, ended)
    failed = {one.command.log for one, status in zip(open_, statuses, strict=True) if status}
    return [one.command.log not in failed for one in trainings]


def run(
    commands: Sequence[Command],
    at_once: int,
    progress: Progress,
    then: Callable[[int, int], None] = lambda number, status: None,
) -> list[int]:
    """Runs commands; returns their exit statuses. One that fails is reported with its last line; the others go on.

    A command that lacked memory beside others runs once more after them, alone.

    Args:
      commands: Each with a log of its own.
      at_once: At most so many run at a time.
      progress: Gets a line for each command that ends.
      then: Called as `then(number, status)` after each command that ends, with its place among the commands.

    Raises:
      ValueError: `at_once` is below 1.
      KeyboardInterrupt: SIGINT or SIGTERM came. The children have ended.
    """
    if at_once < 1:
        raise ValueError(f"--parallel must be 1 or more, got {at_once}")
    statuses = _side_by_side(dict(enumerate(commands)), at_once, progress, then)
    lacked = {i: commands[i] for i, status in statuses.items() if status and TOO_SMALL in commands[i].log.read_text()}
    if lacked and at_once > 1:
        progress.line(f"{len(lacked)} of them lacked memory beside others: again, one at a time")
        statuses |= _side_by_side(lacked, 1, progress, then)
    return [statuses[i] for i in range(len(commands))]


def _side_by_side(commands, at_once, progress, then):
    """The exit statuses of commands, by their numbers."""
    waiting, running, statuses = list(commands.items()), {}, {}
    started, before = time.monotonic(), signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                i, command = waiting.pop(0)
                running[i] = (_started(command, at_once), time.monotonic())
            for i in [i for i, (child, _) in running.items() if child.poll() is not None]:
                child, since = running.pop(i)
                statuses[i] = child.returncode
                _ended(commands[i], child.returncode, time.monotonic() - since, progress)
                then(i, child.returncode)
            many, passed = f"{len(statuses)} of {len(commands)} commands done", duration(time.monotonic() - started)
            progress.status(many, f"{len(running)} running", passed)
            time.sleep(POLL)
    finally:
        _end([child for child, _ in running.values()])
        signal.signal(signal.SIGTERM, before)
        progress.clear()
    return statuses


def _started(command, at_once):
    command.log.parent.mkdir(parents=True, exist_ok=True)
    command.log.write_text(f"$ {command}\n", "utf-8")
    # TensorFlow's own allocator doubles what it holds: five trainings of 110 M did not fit 80 GB.
    shares = {"TF_GPU_ALLOCATOR": "cuda_malloc_async"} if at_once > 1 else {}
    with command.log.open("a") as log:
        return subprocess.Popen(
            [*CHILD, *command.arguments],
            env={**shares, **os.environ},  # noqa: TID251  TensorFlow has no other way
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _ended(command, status, seconds, progress):
    last = _lines(command.log)[-1]
    ended = command.log.read_bytes().endswith(b"\n")
    with command.log.open("a", encoding="utf-8") as log:
        log.write(f"{'' if ended else chr(10)}exit status {status}\n")
    said = f"{command.log.name.removesuffix('.log')}: {duration(seconds)}"
    progress.line(said if status == 0 else f"{said}, failed with status {status}, see {command.log}: {last}")


def _end(children):
    try:
        for child in children:
            child.terminate()
        until = time.monotonic() + GRACE
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0, until - time.monotonic()))
    finally:  # also after a second signal
        for child in children:
            child.kill()
            child.wait()


def _lines(log):
    return log.read_text("utf-8", "replace").splitlines() if log.exists() else []


def diverged(training: Training) -> bool:
    """Whether the run ended because its loss, its gradient or a weight was not a number."""
    return any(DIVERGED in line for line in _lines(training.command.log))


def evaluations(training: Training) -> list[dict]:
    """The evaluations of a run, oldest first; none before the first."""
    return _records(training.folder / "evaluations.jsonl")


def seconds(training: Training) -> float:
    """The time in the training steps of a run, with the step that compiles, in seconds."""
    records = _records(training.folder / "metrics.jsonl")
    tokens = described(training)["batch_size"] * described(training)["sequence_length"]
    return sum(tokens / record["tokens_per_second"] for record in records)


def tokens_per_second(training: Training) -> float | None:
    """The median rate of a run's loops of steps but the first and the last; None for fewer than three loops."""
    records = _records(training.folder / "metrics.jsonl")
    rates = [rate for rate, _ in itertools.groupby(record["tokens_per_second"] for record in records)]
    return statistics.median(rates[1:-1]) if len(rates) > 2 else None


def described(training: Training) -> dict:
    """What `flash-tf describe` says of a training's model."""
    from flash_tf import config, model_stats
    from flash_tf.training import modelling, preflight

    experiment, model = preflight.check_values(config.load(training.config, training.overrides))
    return model_stats.describe(experiment, model, modelling.predicted(experiment))


def device_name() -> str:
    """The device that the children share. This process uses none from now on, and takes no memory of it."""
    import tensorflow as tf

    from benchmarks import backends

    name = backends.device_name()
    tf.config.set_visible_devices([], "GPU")
    return name


def _records(file):
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
