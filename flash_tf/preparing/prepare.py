"""`flash-tf prepare`: the text of a config as windows, in parallel."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from flash_tf import owned_files
from flash_tf.config import Config
from flash_tf.data.prepared import Layout, Prepared
from flash_tf.data.prepared_files import PreparedFiles, begin, finish
from flash_tf.data.sources import SOURCES
from flash_tf.preparing.work import Task, Work
from flash_tf.training import preflight
from flash_tf.training.inputs import make_packing, make_tokenizer
from flash_tf.training.progress import Progress, duration
from flash_tf.training.tasks import objective_of

SPLITS = ("train", "validation")
LOOK = 2  # seconds between two looks at what is written, or longer where a look takes long


def prepare(config: Config, out: str, progress: Progress, do: Callable[[Work, Sequence[Task]], None]) -> dict:
    """Writes the windows of both splits of a config's source into a folder, or what is missing of them.

    Args:
      config: The experiment. Its source, tokenizer, sequence length and packing count, and whether its model is causal.
      out: The folder, local or gs://.
      progress: Shows how far it is.
      do: Does tasks in any order, and returns when all are done; see `pipeline.run`.

    Returns:
      For each split the number of documents, tokens and windows, as `train_tokens`, and the `seconds` that it took.

    Raises:
      ValueError: The config or a text is not valid, or the folder holds something else. Nothing was overwritten.
    """
    start = time.perf_counter()
    config, model = preflight.check_values(config)
    if objective_of(config).encoder_of(config, None) is not None:
        raise ValueError("prepare is for documents, and this model reads labelled examples: `flash-tf train` does")
    out, source = owned_files.place(os.path.expanduser(out).rstrip("/")), SOURCES.build(config.data.source)
    units = {split: _units(source, split) for split in SPLITS}
    begin(out, about := _about(config, source))
    tokenizer = make_tokenizer(config, out, chief=True, report=progress.line)
    layout = Layout.of(make_packing(config, objective_of(config)(config, tokenizer), model), tokenizer)
    begin(out, about := {**about, "tokenizer": tokenizer.fingerprint, **layout.as_mapping()})
    files = {split: PreparedFiles(f"{out}/{split}", layout, units[split]) for split in SPLITS}
    work = Work(out=out, source=config.data.source, layout=layout, vocabulary_size=config.model["vocabulary_size"])
    _write(files, progress, functools.partial(do, work))
    finish(out, about, {split: one.about(one.written()) for split, one in files.items()})
    for one in files.values():
        one.remove_rests()
    return _summary(Prepared(out), time.perf_counter() - start)


def _units(source, split):
    """The units of work: files of a source that says so, else its shards."""
    return source.units(split) if hasattr(source, "units") else source.shards(split)


def _about(config, source):
    """What decides the windows and is known before the tokenizer is."""
    identity = json.dumps(source.identity(), sort_keys=True)
    options = {"tokenizer": config.data.tokenizer, "whitespace": config.data.whitespace, "init_from": config.init_from}
    return {
        "source": config.data.source,
        "identity": hashlib.sha256(identity.encode()).hexdigest(),
        "counts_words": source.counts_words,
        "tokenizer_options": {
            **{k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in options.items()},
            "vocabulary_size": config.model["vocabulary_size"],
        },
    }


def _write(files, progress, do):
    """Writes the units that are missing, then what joins their rests."""
    written = {split: one.written() for split, one in files.items()}
    tasks = [
        Task(split=split, number=number, unit=name)
        for split, one in files.items()
        for number, name in enumerate(one.units)
        if number not in written[split]
    ]
    if done := sum(map(len, written.values())):
        progress.line(f"{done:,} of {done + len(tasks):,} units of text are there already")
    with _Shown(files, written, progress):
        do(tasks)
    written = {split: one.written() for split, one in files.items()}
    for split, units in written.items():
        if not sum(unit.files + unit.rest for unit in units.values()):
            needed = files[split].layout.packing.sequence_length
            raise ValueError(f"the {split} split has no window: it needs a unit of at least {needed} tokens")
    do(
        [
            Task(split=split, number=number, pieces=tuple(pieces), units=len(one.units))
            for split, one in files.items()
            for number, pieces in one.missing_joins(written[split]).items()
        ]
    )


class _Shown:
    """Within it, a thread looks at what is written, and shows it."""

    def __init__(self, files: Mapping[str, PreparedFiles], written: Mapping[str, Mapping], progress: Progress):
        self._files, self._progress, self._ended = files, progress, threading.Event()
        self._seen = {split: set(units) for split, units in written.items()}
        self._total = sum(len(one.units) for one in files.values()) - sum(map(len, written.values()))
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self._start, self._done, self._tokens = time.monotonic(), 0, 0
        if self._total:
            self._show()
            self._thread.start()

    def __exit__(self, *_):
        self._ended.set()
        if self._total:
            self._thread.join()
            with contextlib.suppress(OSError, tf.errors.OpError):
                self._count()
            self._show(keep=True)

    def _look(self):
        took = 0.0
        while not self._ended.wait(max(LOOK, 20 * took)):
            began = time.monotonic()
            with contextlib.suppress(OSError, tf.errors.OpError):  # a network may be away for a moment
                self._count()
            took = time.monotonic() - began
            self._show()

    def _count(self):
        for split, one in self._files.items():
            for number, unit in one.marked(without=self._seen[split]).items():
                self._seen[split].add(number)
                self._done, self._tokens = self._done + 1, self._tokens + unit.tokens

    def _show(self, keep=False):
        seconds = time.monotonic() - self._start
        rate = [f"{self._tokens / seconds:,.0f} tok/s"] if self._done else []
        left = [f"{duration(seconds / self._done * (self._total - self._done))} left"] if self._done else []
        self._progress.status(f"prepared {self._done:,} of {self._total:,} units of text", *rate, *left, keep=keep)


def _summary(prepared, seconds):
    counts = {
        f"{name}_{count}": getattr(split, count)
        for name, split in prepared.splits.items()
        for count in ("documents", "tokens", "windows")
    }
    return {**counts, "seconds": seconds}
