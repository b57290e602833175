"""The files of a checkpoint's arrays, in either of two formats: TensorFlow's, and Orbax's for sharded arrays of JAX.

Both hold a flat dictionary, and any command reads both. TensorFlow and Orbax are imported when they are needed.
"""

import os
import re
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from flash_tf import owned_files

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
TENSORFLOW, ORBAX = "variables", "arrays"  # in a checkpoint's folder
LAST = {TENSORFLOW: f"{TENSORFLOW}.index", ORBAX: f"{ORBAX}/_METADATA"}  # the last file of each


def orbax_path(folder: str) -> str:
    """The path of Orbax's files, which it needs from the root on."""
    return f"{os.path.abspath(folder) if owned_files.is_local(folder) else folder}/{ORBAX}"


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files cannot be read, or whose values are not finite."""


def write(folder: str, variables: Mapping[str, Any]) -> None:
    """Writes variables of TensorFlow.

    Raises:
      OSError: They cannot be written.
    """
    import tensorflow as tf

    try:
        tf.train.Checkpoint(**variables).write(f"{folder}/{TENSORFLOW}")
    except tf.errors.OpError as error:
        # The names of TensorFlow's nodes mean nothing to a user.
        reason = re.sub(r"{{.*}}|\[Op:.*", "", error.message).split("; ")[-1].strip()
        raise OSError(f"the checkpoint {folder} cannot be written: {reason}") from error


def there(folder: str) -> bool:
    """Whether the arrays of a checkpoint are all in its folder."""
    return any(epath.Path(f"{folder}/{name}").exists() for name in LAST.values())


class Arrays:
    """The arrays of a checkpoint in either format.

    Args:
      folder: The checkpoint's folder.

    Attributes:
      shapes: The shape of each array.

    Raises:
      DamagedCheckpoint: The files cannot be read.
      ImportError: What reads them is not installed.
    """

    def __init__(self, folder: str):
        self._folder = folder
        orbax = epath.Path(f"{folder}/{ORBAX}").exists()
        self._open, self.get = (self._open_orbax, self._of_orbax) if orbax else (self._open_tf, self._of_tf)
        try:
            self.shapes: dict[str, tuple[int, ...]] = self._open()
        except ImportError as error:
            needed = "jax" if orbax else "tensorflow"
            raise ImportError(f"{folder} needs pip install 'flash-tf[{needed}]' to be read: {error}") from error
        except Exception as error:
            raise self._damaged(error) from error

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Some arrays.

        Args:
          wanted: Key -> where the array goes. If that has a `sharding` of JAX, files of Orbax give a sharded array.

        Raises:
          DamagedCheckpoint: The files cannot be read.
        """
        try:
            return self.get(wanted)
        except Exception as error:
            raise self._damaged(error) from error

    def _damaged(self, error):
        lines = str(error).splitlines() or [type(error).__name__]
        return DamagedCheckpoint(f"{self._folder} is damaged: {lines[0][:200]}")

    def _open_tf(self):
        import tensorflow as tf

        self._reader = tf.train.load_checkpoint(f"{self._without_globs()}/{TENSORFLOW}")
        shapes = self._reader.get_variable_to_shape_map()
        return {name.removesuffix(SUFFIX): tuple(x) for name, x in shapes.items() if name.endswith(SUFFIX)}

    def _without_globs(self):
        """A path of the folder without characters of globs: TensorFlow takes the path of a checkpoint for a glob."""
        if not owned_files.is_local(self._folder) or not re.search(r"[*?[\\]", self._folder):
            return self._folder
        folder = os.open(self._folder, os.O_RDONLY)
        weakref.finalize(self, os.close, folder)  # its files are opened when an array is read
        return f"/proc/self/fd/{folder}"

    def _of_tf(self, wanted):
        return {key: self._reader.get_tensor(key + SUFFIX) for key in wanted}

    def _open_orbax(self):
        import orbax.checkpoint as ocp

        self._path = orbax_path(self._folder)
        self._reader = ocp.PyTreeCheckpointer()
        return {key: tuple(x.shape) for key, x in self._reader.metadata(self._path).item_metadata.tree.items()}

    def _of_orbax(self, wanted):
        import orbax.checkpoint as ocp

        def how(where):
            sharding = getattr(where, "sharding", None)
            if sharding is None:
                return ocp.RestoreArgs(restore_type=np.ndarray)
            return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=where.shape)

        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(wanted, 0),
            restore_args={key: how(where) for key, where in wanted.items()},
            partial_restore=True,
        )
        return self._reader.restore(self._path, args=args)
