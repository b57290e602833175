"""What a run of an exported step keeps in its folder, and the learning rates that it takes. No TensorFlow."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from flash_tf.compiling.manifest import CONFIG, MANIFEST, TOKENIZER, Manifest
from flash_tf.training import schedule

RUN, STATE, LOSSES, EVALUATIONS = "run.json", "state.npz", "losses.jsonl", "evaluations.jsonl"
# What a run may set: of the options in the config these alone are not part of the exported step.
MAY_SET = {
    "optimizer.learning_rate": float,
    "optimizer.schedule": str,
    "optimizer.warmup_steps": int,
    "optimizer.final_learning_rate": float,
    "train.steps": int,
}
POSITIVE = ("optimizer.learning_rate", "train.steps")
LATER = {"schedule_steps": None, "constant_after": None}  # options that older artifacts do not have
SCHEDULES = ("linear", "cosine", "inverse_sqrt")


class Schedule:
    """The learning rate of every step: the config's, with what the run sets otherwise.

    Args:
      manifest: Of the artifact.
      overrides: `key=value` each.

    Attributes:
      steps: Of the whole run.
      changed: Key -> value of what the run sets.

    Raises:
      ValueError: For an option that is part of the exported step, or a value that is none.
    """

    def __init__(self, manifest: Manifest, overrides: Iterable[str] = ()):
        self.changed: dict[str, Any] = dict(_override(text) for text in overrides)
        of = {
            part: {
                **manifest.config[part],
                **{k.split(".")[1]: v for k, v in self.changed.items() if k.startswith(f"{part}.")},
            }
            for part in ("optimizer", "train")
        }
        self._optimizer, self.steps = types.SimpleNamespace(**{**LATER, **of["optimizer"]}), of["train"]["steps"]

    def rate(self, done: int) -> float:
        """The learning rate of the step after `done` steps."""
        return float(schedule.learning_rate(self._optimizer, self.steps, np.float32(done), np))

    def in_config(self, text: str) -> str:
        """The text of a resolved config.yaml with what the run sets; each option is a line of its section."""
        for key, value in self.changed.items():
            section, name = key.split(".")
            line = re.compile(rf"(?m)(^{section}:\n(?:  .*\n)*?  {name}: ).*$")
            text = line.sub(lambda found, value=value: f"{found[1]}{_yaml(value)}", text, count=1)
        return text


def _override(text):
    key, equals, value = text.partition("=")
    if not equals or key not in MAY_SET:
        raise ValueError(f"--set takes KEY=VALUE of {', '.join(MAY_SET)}; the step has all else in it; got {text!r}")
    try:
        made = MAY_SET[key](value)
    except ValueError:
        raise ValueError(f"--set {key} must be {MAY_SET[key].__name__}, got {value!r}") from None
    if key == "optimizer.schedule":
        allowed, needed = made in SCHEDULES, f"one of {', '.join(SCHEDULES)}"
    elif key in POSITIVE:
        allowed, needed = 0 < made < float("inf"), "a positive number"
    else:
        allowed, needed = 0 <= made < float("inf"), "a number that is not negative"
    if not allowed:
        raise ValueError(f"--set {key} must be {needed}, got {value!r}")
    return key, made


def _yaml(value):
    """A value as YAML 1.1 reads it back: a number with an exponent needs a dot."""
    mantissa, e, exponent = str(value).partition("e")
    return f"{mantissa}.0e{exponent}" if e and "." not in mantissa and isinstance(value, float) else str(value)


@dataclasses.dataclass(kw_only=True)
class State:
    """Where a run is.

    Attributes:
      step: Steps done.
      seconds: That they took, evaluations left out.
      variables: Name -> array, of the device or of the host.
    """

    step: int
    seconds: float
    variables: dict[str, Any]


class RunFolder:
    """The folder of a run: a model directory that `flash-tf evaluate` reads, with the state to go on from.

    Args:
      path: The folder.
      artifact: The artifact's.
      about: What decides the run's numbers; a folder holds one run.

    Raises:
      ValueError: When the folder holds another run, or something else.
    """

    def __init__(self, path: str, artifact: str, rates: Schedule, about: dict[str, Any]):
        self.path = Path(path)
        manifest = Path(artifact, MANIFEST).read_bytes()
        about = {"artifact": hashlib.sha256(manifest).hexdigest(), "set": rates.changed, **about}
        self._claim(about)
        (self.path / CONFIG).write_text(rates.in_config(Path(artifact, CONFIG).read_text()))
        if Path(artifact, TOKENIZER).exists():
            shutil.copyfile(Path(artifact, TOKENIZER), self.path / TOKENIZER)

    def _claim(self, about):
        self.path.mkdir(parents=True, exist_ok=True)
        run = self.path / RUN
        losses = self.path / LOSSES
        begun = (self.path / STATE).exists() or (losses.exists() and losses.stat().st_size > 0)
        if run.exists() and begun:
            there = json.loads(run.read_text())
            if changed := sorted(key for key in {*there, *about} if there.get(key) != about.get(key)):
                raise ValueError(f"{self.path} holds a run of another {changed[0]}: use another --out")
        elif not run.exists() and any(self.path.iterdir()):
            raise ValueError(f"{self.path} holds something else: --out needs a new folder, or one with a run to go on")
        _replace(run, json.dumps(about, indent=1) + "\n")

    def restore(self) -> State | None:
        """The state that was saved last, its arrays on the host; None before the first.

        Raises:
          ValueError: When it is damaged.
        """
        if not (self.path / STATE).exists():
            return None
        try:
            with np.load(self.path / STATE) as arrays:
                variables = {name: arrays[name] for name in arrays.files}
            step, seconds = int(variables.pop("step")), float(variables.pop("seconds"))
        except Exception as error:  # of zipfile, zlib or NumPy
            raise ValueError(f"{self.path / STATE} is damaged: remove it, and the run begins anew") from error
        return State(step=step, seconds=seconds, variables=variables)

    def save(self, state: State) -> None:
        """Writes a state in place of the last; its arrays come from the device one at a time."""
        partial = self.path / f"{STATE}.partial"
        with open(partial, "wb") as file:
            np.savez(file, step=np.int64(state.step), seconds=np.float64(state.seconds), **state.variables)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path / STATE)

    def records(self, name: str, step: int) -> "Records":
        """A file of records kept up to a step."""
        return Records(self.path / name, step)


class Records:
    """A file of JSON lines, each with its `step`. Lines of later steps, of a process that died, are dropped."""

    def __init__(self, path: Path, step: int):
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        _replace(path, "".join(f"{line}\n" for line in kept))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  open as long as the run

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record."""
        self._file.write(json.dumps(record) + "\n")


def _replace(path, text):
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def fingerprint(tokens: np.ndarray) -> str:
    """Of the numbers in a token file."""
    return hashlib.sha256(np.ascontiguousarray(tokens)).hexdigest()
