"""What runs recorded, step by step. Reads `flash-tf train`'s files, and those of an exported step's run."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

METRICS = ("metrics.jsonl", "losses.jsonl")  # of `flash-tf train`, and of the run of an exported step
EVALUATIONS, CONFIG = "evaluations.jsonl", "config.yaml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The records of a run that stand. Arrays have one number a record, NaN where it has none.

    Attributes:
      label: What it is called.
      folder: Where it is.
      steps: Ascending.
      loss: Mean negative log-likelihood of a predicted token.
      gradient_norm: Before clipping.
      rate: Tokens a second.
      seconds: Of training steps up to each, evaluations and the time between two starts left out; None if unknown.
      evaluations: Step -> validation loss.
      planned: Steps that its config asks for, None if unknown.
    """

    label: str
    folder: str
    steps: np.ndarray
    loss: np.ndarray
    gradient_norm: np.ndarray
    rate: np.ndarray
    seconds: np.ndarray | None
    evaluations: dict[int, float]
    planned: int | None

    @property
    def diverged(self) -> int | None:
        """The first step whose loss is not a number, None if all are."""
        bad = np.flatnonzero(~np.isfinite(self.loss))
        return int(self.steps[bad[0]]) if len(bad) else None

    @property
    def best(self) -> int | None:
        """The step of the lowest validation loss, None where none is a number."""
        finite = {step: loss for step, loss in self.evaluations.items() if math.isfinite(loss)}
        return min(finite, key=finite.get) if finite else None


def read_all(places: Sequence[str]) -> list[Run]:
    """The runs in folders, each given as `DIR` or `LABEL=DIR`; a folder that is given twice counts once.

    Runs get the shortest names that tell them apart.

    Raises:
      ValueError: When a folder is no run, or its records are none.
    """
    found: dict[str, tuple[str, str]] = {}
    for place in places:
        label, _, named = place.rpartition("=")
        label, folder = ("", place) if not label or _exists(place) else (label, named)
        found.setdefault(folder if "://" in folder else str(Path(folder).resolve()), (label, folder))
    names = short_names([path for path, (label, _) in found.items() if not label])
    runs = [read(folder, label or names[path]) for path, (label, folder) in found.items()]
    labels = [run.label for run in runs]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"two runs are called {twice!r}: give them other names, as LABEL=RUN_DIR")
    return runs


def short_names(folders: Sequence[str]) -> dict[str, str]:
    """Of each path its last parts, as few as no other path ends with."""
    ends = {folder: _ends(folder) for folder in folders}
    taken = Counter(end for of_one in ends.values() for end in of_one)
    return {folder: next((end for end in of_one if taken[end] == 1), folder) for folder, of_one in ends.items()}


def _ends(folder):
    parts = folder.strip("/").split("/")
    return ["/".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]


def read(folder: str, label: str) -> Run:
    """Reads one run.

    Raises:
      ValueError: When the folder has no records, or damaged ones.
    """
    file = next((f"{folder}/{name}" for name in METRICS if _exists(f"{folder}/{name}")), None)
    if file is None:
        raise ValueError(f"{folder} is no run: {_what_is_there(folder)}")
    records = _standing(file)
    if not records:
        raise ValueError(f"{file} has no record yet: the run has not finished its first loop of steps")
    config = _config(folder)
    train = config.get("train") if isinstance(config.get("train"), dict) else {}
    column = lambda name: np.array([_number(record.get(name)) for record in records])  # noqa: E731
    steps, rate = np.array([record["step"] for record in records]), column("tokens_per_second")
    seconds = _seconds(steps, rate, column("seconds"), train.get("tokens_per_step"))
    if seconds is not None and not np.isfinite(rate).any() and train.get("tokens_per_step"):
        rate = train["tokens_per_step"] * np.diff(steps, prepend=0) / np.maximum(np.diff(seconds, prepend=0), 1e-9)
    evaluations = f"{folder}/{EVALUATIONS}"
    return Run(
        label=label,
        folder=folder,
        steps=steps,
        loss=column("loss"),
        gradient_norm=column("gradient_norm"),
        rate=rate,
        seconds=seconds,
        evaluations={r["step"]: _number(r.get("loss")) for r in _standing(evaluations)} if _exists(evaluations) else {},
        planned=train.get("steps"),
    )


def _standing(path: str) -> list[dict[str, Any]]:
    """The records in a file that stand: a step that is written again, after a crash, takes back all from it on.

    A last line that is cut off is of a run that is writing, or died while it did.
    """
    kept: list[dict[str, Any]] = []
    lines = _text(path).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step = record["step"]
            if not isinstance(step, int) or "loss" not in record:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise ValueError(f"{path} is damaged: line {number} needs a JSON object with step and loss") from None
        while kept and kept[-1]["step"] >= step:
            kept.pop()
        kept.append(record)
    return kept


def _seconds(steps, rate, seconds, tokens_per_step):
    """The records' own times, or what their rates add up to; None where neither is there."""
    if np.isfinite(seconds).all():
        return seconds
    known = np.isfinite(rate) & (rate > 0)
    if not tokens_per_step or not known.any():
        return None
    rate = np.where(known, rate, np.median(rate[known]))
    return np.cumsum(tokens_per_step * np.diff(steps, prepend=0) / rate)


def _number(value):
    return float(value) if isinstance(value, int | float) else math.nan


def _config(folder):
    if not _exists(f"{folder}/{CONFIG}"):
        return {}
    try:
        values = yaml.safe_load(_text(f"{folder}/{CONFIG}"))
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _what_is_there(folder):
    """Why a folder is none, and which runs are inside it, for whoever meant those."""
    if "://" not in folder and not Path(folder).is_dir():
        return "there is no such folder"
    needed = f"it has no {METRICS[0]}, which `flash-tf train` writes"
    found = [] if "://" in folder else sorted(p.parent.name for name in METRICS for p in Path(folder).glob(f"*/{name}"))
    return f"{needed}; the runs in it are {', '.join(found[:8])}{' …' * (len(found) > 8)}" if found else needed


def _exists(path):
    if "://" not in path:
        return Path(path).exists()
    import tensorflow as tf  # slow to import, and needed for buckets alone

    return tf.io.gfile.exists(path)


def _text(path):
    if "://" not in path:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    import tensorflow as tf

    with tf.io.gfile.GFile(path) as file:
        return file.read()
