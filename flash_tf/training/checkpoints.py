"""Checkpoints that count only when they are whole, and that load under any strategy."""

import json
import math
import re
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from flash_tf import renamed
from flash_tf.training.run_directory import aside

MARKER = "complete.json"  # written last: gs:// has no atomic rename
LAST = "variables.index"  # the last of TensorFlow's files


class Checkpoints:
    """The checkpoints of a run. Each is a folder `step-00001000` with TensorFlow's files and a marker.

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
        return [step for step in self._folders() if tf.io.gfile.exists(f"{self._folder(step)}/{MARKER}")]

    def _folders(self):
        if not tf.io.gfile.isdir(self.directory):
            return []
        names = (re.fullmatch(r"step-(\d+)/?", name) for name in tf.io.gfile.listdir(self.directory))
        return sorted(int(match[1]) for match in names if match)

    def notes(self, step: int) -> dict:
        """The notes of a checkpoint: `step`, `position`; and `loss`, or also `rank`, if it was evaluated."""
        where = self._folder(step)
        try:
            with tf.io.gfile.GFile(f"{where}/{MARKER}") as file:
                notes = json.load(file)
        except ValueError as error:  # it is no JSON, or no text
            raise DamagedCheckpoint(f"{where} is damaged: its {MARKER} is not JSON") from error
        if not isinstance(notes, dict) or notes.get("step") != step:
            raise DamagedCheckpoint(f"{where} is damaged: its {MARKER} does not name step {step}")
        return notes

    def save(self, variables: dict[str, tf.Variable], notes: dict) -> None:
        """Writes a checkpoint of `notes["step"]`. It counts once the marker is there."""
        folder = self._folder(notes["step"])
        if tf.io.gfile.exists(folder):
            tf.io.gfile.rmtree(folder)  # it has no marker: a process died while it wrote
        tf.io.gfile.makedirs(folder)
        try:
            tf.train.Checkpoint(**{_key(name): v for name, v in variables.items()}).write(f"{folder}/variables")
        except tf.errors.OpError as error:
            # The names of TensorFlow's nodes mean nothing to a user.
            reason = re.sub(r"{{.*}}|\[Op:.*", "", error.message).split("; ")[-1].strip()
            raise OSError(f"the checkpoint {folder} cannot be written: {reason}") from error
        self._mark(notes["step"], {**notes, "variables": len(variables)})

    def note(self, step: int, notes: dict) -> None:
        """Adds notes to a whole checkpoint."""
        self._mark(step, {**self.notes(step), **notes})

    def _mark(self, step, notes):
        path = f"{self._folder(step)}/{MARKER}"
        with tf.io.gfile.GFile(f"{path}.partial", "w") as file:
            file.write(json.dumps(notes) + "\n")
        tf.io.gfile.rename(f"{path}.partial", path, overwrite=True)

    def restore(self, variables: dict[str, tf.Variable], step: int) -> dict:
        """Assigns every variable from the checkpoint of `step`. Returns the checkpoint's notes.

        Raises:
          ValueError: Names or shapes differ from the checkpoint, its files cannot be read, or a value is not finite.
        """
        where = self._folder(step)
        try:
            notes = self.notes(step)
            reader = tf.train.load_checkpoint(f"{where}/variables")
            shapes = reader.get_variable_to_shape_map()
            stored = {name.removesuffix(SUFFIX): shape for name, shape in shapes.items() if name.endswith(SUFFIX)}
            keys = {name: _stored_key(name, stored) for name in variables}
            self._compare(where, {keys[name]: list(v.shape) for name, v in variables.items()}, stored)
            values = {name: reader.get_tensor(keys[name] + SUFFIX) for name in variables}
        except (tf.errors.OpError, RuntimeError, IndexError) as error:
            raise DamagedCheckpoint(f"{where} is damaged: {str(error).splitlines()[0][:200]}") from error
        if (bad := not_finite(values.items())) is not None:
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

    def restore_first(self, variables: dict[str, tf.Variable], steps: list[int]) -> dict:
        """Restores the first of some checkpoints that is not damaged, and reports each one before it.

        Raises:
          ValueError: The checkpoints are of another model, or all are damaged.
        """
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            try:
                return self.restore(variables, step)
            except DamagedCheckpoint as error:
                if len(steps) == 1:
                    raise
                if following is None:
                    raise ValueError(
                        f"none of the {len(steps)} checkpoints in {self.directory} can be read: {error}"
                    ) from error
                self._report(f"{error}; falling back to step {following:,}")

    def restore_newest(self, variables: dict[str, tf.Variable]) -> dict | None:
        """As `restore_first`, the newest first. None if there is no checkpoint."""
        steps = self.steps()
        return self.restore_first(variables, steps[::-1]) if steps else None

    def set_aside(self, after: int) -> None:
        """Renames the checkpoints of later steps, which could not be read. The run comes to these steps again."""
        for step in self._folders():
            folder = self._folder(step)
            if step > after and any(tf.io.gfile.exists(f"{folder}/{name}") for name in (MARKER, LAST)):
                beside = aside(folder)
                tf.io.gfile.rename(folder, beside)
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
                tf.io.gfile.remove(f"{self._folder(step)}/{MARKER}")
            tf.io.gfile.rmtree(self._folder(step))

    def _folder(self, step):
        return f"{self.directory}/step-{step:08d}"


SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
SLOTS = ("m|", "v|")  # the optimizer's variables, which a trained model does without


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files cannot be read, or whose values are not finite."""


def not_finite(arrays: Iterable[tuple[str, np.ndarray]]) -> str | None:
    """The name of the first array that holds NaN or infinity, or None."""
    return next((name for name, array in arrays if not np.isfinite(array).all()), None)


def _key(name):
    """A variable's name as one attribute of `tf.train.Checkpoint`."""
    return name.replace("/", "|")  # TensorFlow escapes "." and "/" in the names it stores


def _name(key):
    return key.replace("|", "/")


def _stored_key(name, stored):
    """The key of a variable in a checkpoint, which may have its old name."""
    old = _key(renamed.old_variable(name))
    return old if old in stored and _key(name) not in stored else _key(name)
