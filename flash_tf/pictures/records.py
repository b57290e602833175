"""Read the records of runs of `flash-tf train`, step by step."""

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flash_tf import owned_files, strict_yaml

METRICS, EVALUATIONS, CONFIG, TOKENIZERS = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "config.yaml",
    ("tokenizer.model", "tokenizer.json"),
)
TASKS = {"masked_lm": "masked language model", "causal_lm": "causal language model"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The meaning of a run's loss. None stands for a value that the folder does not say.

    Attributes:
      model: Type of the model, as configs call it.
      vocabulary_size: Number of tokens.
      tokenizer: First letters of the tokenizer file's SHA-256.
      masked: Share of the tokens that a masked model predicts.
    """

    model: str | None = None
    vocabulary_size: int | None = None
    tokenizer: str | None = None
    masked: float | None = None

    @property
    def of_tokens(self) -> bool:
        """Whether the loss is one of predicted tokens, which has a perplexity; True where the folder does not say."""
        return self.model in (None, *TASKS)

    def comparable(self, other: "Task") -> bool:
        """Whether losses of the two may stand on one axis: no value that both know differs."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return all(a is None or b is None or a == b for a, b in pairs)

    def __str__(self):
        named = [
            (TASKS.get(self.model, self.model), "{}"),
            (self.masked, "{:.0%} masked"),
            (self.vocabulary_size, "vocabulary {:,}"),
            (self.tokenizer, "tokenizer {}"),
        ]
        return ", ".join(pattern.format(value) for value, pattern in named if value is not None) or "unknown task"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run's valid records. Arrays have one number for each record, NaN where it has none.

    Attributes:
      label: Its name in pictures.
      folder: Its path.
      task: The meaning of its loss.
      steps: Ascending.
      loss: The mean negative log-likelihood of a predicted token for language models, the task's loss for others.
      gradient_norm: Before clipping.
      rate: Tokens a second.
      seconds: Time of all training steps so far, without evaluations and pauses between starts; None if unknown.
      evaluations: Step -> validation loss.
      planned: Steps that its config asks for, None if unknown.
      stopped_early: Whether `evaluation.patience` has ended it.
    """

    label: str
    folder: str
    task: Task
    steps: np.ndarray
    loss: np.ndarray
    gradient_norm: np.ndarray
    rate: np.ndarray
    seconds: np.ndarray | None
    evaluations: dict[int, float]
    planned: int | None
    stopped_early: bool

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
    """Reads the runs in folders, each given as `DIR` or `LABEL=DIR`; a folder given twice counts once.

    Runs get the shortest names that tell them apart.

    Raises:
      ValueError: When a folder is no run, or has no record.
    """
    found: dict[str, tuple[str, str]] = {}
    for place in places:
        label, folder = _parted(place)
        found.setdefault(folder if not owned_files.is_local(folder) else str(Path(folder).resolve()), (label, folder))
    names = short_names([path for path, (label, _) in found.items() if not label])
    runs = [read(folder, label or names[path]) for path, (label, folder) in found.items()]
    labels = [run.label for run in runs]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"two runs are called {twice!r}: give them other names, as LABEL=RUN")
    return runs


def _parted(place):
    """Label and folder of `LABEL=DIR`. Both may have a "=": the folder begins behind the first one where it exists."""
    cuts = [i for i, character in enumerate(place) if character == "=" and i]
    if not cuts or _exists(place):
        return "", place
    at = next((i for i in cuts if _exists(place[i + 1 :])), cuts[-1])
    return place[:at], place[at + 1 :]


def short_names(folders: Sequence[str]) -> dict[str, str]:
    """The shortest end of each path that no other path ends with."""
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
    file = f"{folder}/{METRICS}"
    if not _exists(file):
        raise ValueError(f"{folder} is no run: {_what_is_there(folder)}")
    records = _standing(file)
    if not records:
        raise ValueError(f"{file} has no record yet: the run has not finished its first loop of steps")
    config = _config(folder)
    train = _section(config, "train")
    column = lambda name: np.array([_number(record.get(name)) for record in records])  # noqa: E731
    steps, rate = np.array([record["step"] for record in records]), column("tokens_per_second")
    path = f"{folder}/{EVALUATIONS}"
    evaluations = _standing(path) if _exists(path) else []
    return Run(
        label=label,
        folder=folder,
        task=_task(folder, config),
        steps=steps,
        loss=column("loss"),
        gradient_norm=column("gradient_norm"),
        rate=rate,
        seconds=_seconds(steps, rate, train.get("tokens_per_step")),
        evaluations={record["step"]: _number(record.get("loss")) for record in evaluations},
        planned=train.get("steps"),
        stopped_early=_stopped_early(evaluations, _section(config, "evaluation")),
    )


def _stopped_early(evaluations, section):
    """Whether the last `patience` evaluations are no better than one before them, as the training counts them."""
    patience, metric = section.get("patience"), section.get("metric", "loss")
    best, waited = math.inf, 0
    for record in evaluations:
        rank = _number(record.get(metric)) * (1 if metric == "loss" else -1)
        best, waited = (rank, 0) if rank < best else (best, waited + 1)
    return isinstance(patience, int) and waited >= patience


def _standing(path: str) -> list[dict[str, Any]]:
    """The valid records of a file: a step that is written again after a crash replaces all records from it on.

    The last line may be cut off, because the run is writing it or died while it did.
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


def _seconds(steps, rate, tokens_per_step):
    """The time up to each record, by the rates; None without them."""
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
        values = strict_yaml.load(_bytes(f"{folder}/{CONFIG}"), CONFIG)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _section(config, name):
    return config[name] if isinstance(config.get(name), dict) else {}


def _task(folder, config):
    model = _section(config, "model")
    place = next((path for name in TOKENIZERS if _exists(path := f"{folder}/{name}")), None)
    return Task(
        model=model.get("type"),
        vocabulary_size=model.get("vocabulary_size"),
        tokenizer=hashlib.sha256(_bytes(place)).hexdigest()[:8] if place else None,
        masked=_section(config, "masking").get("rate"),
    )


def by_task(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs whose losses can be compared, together; each group in the order given."""
    groups: list[list[Run]] = []
    for run in runs:
        home = next((group for group in groups if all(run.task.comparable(one.task) for one in group)), None)
        if home is None:
            groups.append(home := [])
        home.append(run)
    return groups


def _what_is_there(folder):
    """Why a folder is no run, and which runs are inside it, since the user may have meant those."""
    if owned_files.is_local(folder) and not Path(folder).is_dir():
        return "there is no such folder"
    needed = f"it has no {METRICS}, which `flash-tf train` writes"
    found = [] if not owned_files.is_local(folder) else sorted(p.parent.name for p in Path(folder).glob(f"*/{METRICS}"))
    return f"{needed}; the runs in it are {', '.join(found[:8])}{' …' * (len(found) > 8)}" if found else needed


def _exists(path):
    if owned_files.is_local(path):
        return Path(path).exists()
    import tensorflow as tf  # slow to import, and needed for buckets alone

    return tf.io.gfile.exists(owned_files.reachable(path))


def _text(path):
    return _bytes(path).decode("utf-8", errors="replace")


def _bytes(path):
    if owned_files.is_local(path):
        return Path(path).read_bytes()
    import tensorflow as tf

    with tf.io.gfile.GFile(path, "rb") as file:
        return file.read()
