"""Checkpoints that count only when they are whole, and that load under any strategy."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from flash_tf import renamed
from flash_tf.data import stored
from flash_tf.training import checkpoint_files
from flash_tf.training.checkpoint_files import DamagedCheckpoint
from flash_tf.training.run_directory import aside

MARKER = "complete.json"  # written last: gs:// has no atomic rename


class Checkpoints:
    """The checkpoints of a run. Each is a folder `step-00001000` with files of arrays and a marker.

    Variables are stored one by one under their own names, because `tf.train.Checkpoint(model=...)` silently skips
    layers in lists.

    Args:
      directory: The folder of the checkpoints' folders; local or gs://.
      report: Called with a line about a damaged checkpoint.
    """

    def __init__(self, directory: str, report: Callable[[str], None] = lambda line: None):
        self.directory, self._report = directory, report

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, oldest first."""
        return [step for step in self._folders() if epath.Path(f"{self._folder(step)}/{MARKER}").exists()]

    def _folders(self):
        names = (re.fullmatch(r"step-(\d+)/?", name) for name in stored.names(self.directory))
        return sorted(int(match[1]) for match in names if match)

    def notes(self, step: int) -> dict:
        """The notes of a checkpoint: `step`, `position`; and `loss`, or also `rank`, if it was evaluated."""
        where = self._folder(step)
        try:
            notes = json.loads(epath.Path(f"{where}/{MARKER}").read_bytes())
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{where} is damaged: it has no {MARKER}") from error
        except ValueError as error:  # it is no JSON, or no text
            raise DamagedCheckpoint(f"{where} is damaged: its {MARKER} is not JSON") from error
        if not isinstance(notes, dict) or notes.get("step") != step:
            raise DamagedCheckpoint(f"{where} is damaged: its {MARKER} does not name step {step}")
        return notes

    def save(self, variables: Mapping[str, Any], notes: dict) -> None:
        """Writes a checkpoint of `notes["step"]`. It counts once the marker is there."""
        checkpoint_files.write(self._begin(notes["step"]), {key_of(name): v for name, v in variables.items()})
        self._mark(notes["step"], {**notes, "variables": len(variables)})

    def _begin(self, step):
        """The folder of a new checkpoint, empty."""
        folder = epath.Path(self._folder(step))
        if folder.exists():
            folder.rmtree()  # it has no marker: a process died while it wrote
        folder.mkdir(parents=True)
        return str(folder)

    def note(self, step: int, notes: dict) -> None:
        """Adds notes to a whole checkpoint."""
        self._mark(step, {**self.notes(step), **notes})

    def _mark(self, step, notes):
        stored.write(f"{self._folder(step)}/{MARKER}", (json.dumps(notes) + "\n").encode())

    def restore(self, variables: Mapping[str, Any], step: int) -> dict:
        """Assigns every variable from the checkpoint of `step`. Returns the checkpoint's notes.

        Raises:
          ValueError: Names or shapes differ from the checkpoint, its files cannot be read, or a value is not finite.
        """
        where = self._folder(step)
        notes, arrays = self.notes(step), checkpoint_files.Arrays(where)
        keys = {name: _stored_key(name, arrays.shapes) for name in variables}
        self._compare(where, {keys[name]: list(v.shape) for name, v in variables.items()}, arrays.shapes)
        read = arrays.read({keys[name]: v for name, v in variables.items()})
        values = {name: read[key] for name, key in keys.items()}
        if (bad := self.not_finite(values)) is not None:
            raise DamagedCheckpoint(f"{where} is damaged: {bad} is not finite")
        for name, variable in variables.items():
            variable.assign(values[name])
        return notes

    def _compare(self, where, needed, stored):
        missing = sorted(name for name in needed if name not in stored)
        if missing and all(name.startswith(SLOTS) for name in missing):
            raise ValueError(f"{where} holds weights and no optimizer's state: start a new run from it with init_from")
        if missing:
            raise ValueError(
                f"{where} is of another model: it has no {_name(missing[0])} ({len(missing)} variables are missing)"
            )
        more = sorted(name for name in stored if name not in needed and not name.startswith(SLOTS))
        if more:
            raise ValueError(
                f"{where} is of another model: it has {_name(more[0])}, which the config's model lacks "
                f"({len(more)} variables are too many)"
            )
        wrong = next((name for name in needed if list(stored[name]) != needed[name]), None)
        if wrong is not None:
            raise ValueError(f"{where}: {_name(wrong)} needs shape {needed[wrong]}, got {list(stored[wrong])}")

    def restore_first(self, variables: Mapping[str, Any], steps: list[int]) -> dict:
        """Restores the first of some checkpoints that is not damaged, and reports each one before it.

        Raises:
          ValueError: The checkpoints are of another model, all are damaged, or the run removed one meanwhile.
        """
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            try:
                return self.restore(variables, step)
            except DamagedCheckpoint as error:
                if step not in self.steps():
                    raise ValueError(f"{self._folder(step)} was removed while it was read: its run goes on") from error
                if len(steps) == 1:
                    raise
                if following is None:
                    raise ValueError(
                        f"none of the {len(steps)} checkpoints in {self.directory} can be read: {error}"
                    ) from error
                self._report(f"{error}; falling back to step {following:,}")

    def restore_newest(self, variables: Mapping[str, Any]) -> dict | None:
        """As `restore_first`, the newest first. None if there is no checkpoint."""
        steps = self.steps()
        return self.restore_first(variables, steps[::-1]) if steps else None

    def set_aside(self, after: int) -> None:
        """Renames the checkpoints of later steps, which could not be read. The run comes to these steps again."""
        for step in self._folders():
            folder = self._folder(step)
            if step > after and (epath.Path(f"{folder}/{MARKER}").exists() or checkpoint_files.there(folder)):
                beside = aside(folder)
                epath.Path(folder).rename(beside)
                self._report(f"{folder}: this checkpoint is now in {beside}")

    def best(self) -> int | None:
        """Step of the checkpoint with the best evaluation; None if none was evaluated."""
        ranks = {step: self._rank(step) for step in self.steps()}
        evaluated = {step: rank for step, rank in ranks.items() if rank is not None}
        return min(evaluated, key=evaluated.get) if evaluated else None

    def _rank(self, step):
        """The `rank` in the notes, or the validation loss; None if there is none, or none that can be compared."""
        try:
            notes = self.notes(step)
        except DamagedCheckpoint:
            return None
        loss = notes.get("rank", notes.get("loss"))
        return loss if isinstance(loss, int | float) and math.isfinite(loss) else None

    def prune(self, newest: int) -> None:
        """Deletes all checkpoints except the newest `newest` whole ones and the best one."""
        whole = self.steps()
        old = [step for step in self._folders() if step < whole[-1]]
        for step in set(old) - set(whole[-newest:]) - {self.best()}:
            if step in whole:
                stored.remove(f"{self._folder(step)}/{MARKER}")
            epath.Path(self._folder(step)).rmtree()

    def not_finite(self, values: Mapping[str, Any]) -> str | None:
        """The name of the first array that holds NaN or infinity, or None."""
        return not_finite(values.items())

    def _folder(self, step):
        return f"{self.directory}/step-{step:08d}"


SLOTS = ("m|", "v|")  # the optimizer's variables, which a trained model does without


def not_finite(arrays: Iterable[tuple[str, np.ndarray]]) -> str | None:
    """The name of the first array that holds NaN or infinity, or None."""
    return next((name for name, array in arrays if not np.isfinite(array).all()), None)


def key_of(name):
    """A variable's name as one attribute of `tf.train.Checkpoint`."""
    return name.replace("/", "|")  # TensorFlow escapes "." and "/" in the names it stores


def _name(key):
    return key.replace("|", "/")


def _stored_key(name, stored):
    """The key of a variable in a checkpoint, which may have its old name."""
    old = key_of(renamed.old_variable(name))
    return old if old in stored and key_of(name) not in stored else key_of(name)
