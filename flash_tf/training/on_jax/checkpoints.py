"""Checkpoints of sharded arrays, which Orbax writes while training goes on."""

import concurrent.futures
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from flash_tf.training import checkpoint_files
from flash_tf.training.checkpoints import Checkpoints, key_of


class Place:
    """The place of one array of a run's state, to restore into.

    Attributes:
      shape: The array's shape.
      sharding: How it lies on the mesh.
      value: The array; None before it is assigned.
    """

    def __init__(self, shape: tuple[int, ...], sharding: NamedSharding, value: jax.Array | None = None):
        self.shape, self.sharding, self.value = shape, sharding, value

    def assign(self, value: Any) -> None:
        """Takes a sharded array, or a whole one, from which each device gets its part."""
        if not isinstance(value, jax.Array) or value.sharding != self.sharding:
            whole = np.asarray(value)
            value = jax.make_array_from_callback(self.shape, self.sharding, lambda index: whole[index])
        self.value = value


class ShardedCheckpoints(Checkpoints):
    """As `Checkpoints`, for arrays of JAX. Each process writes its own parts.

    `save` returns when the arrays are in the host's memory. A thread waits until all processes have written them, and
    then does, in their order, what makes the checkpoint count and deletes old ones. The end of a `with` waits for all.

    Args:
      directory: The folder of the checkpoints' folders; local or gs://.
      report: Called with a line about a damaged checkpoint.
      chief: Whether this process writes the markers.
    """

    def __init__(self, directory: str, report, chief: bool):
        super().__init__(directory, report)
        self._chief, self._orbax = chief, ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._thread, self._work = concurrent.futures.ThreadPoolExecutor(1), []

    def save(self, variables: Mapping[str, jax.Array], notes: dict) -> None:
        """Begins to write a checkpoint of `notes["step"]`. Every process calls it."""
        self.finish()
        step = notes["step"]
        if self._chief:
            self._begin(step)
        arrays = {key_of(name): x for name, x in variables.items()}
        self._orbax.save(checkpoint_files.orbax_path(self._folder(step)), args=ocp.args.PyTreeSave(arrays))
        self._later(self._written, step, {**notes, "variables": len(variables)})

    def note(self, step: int, notes: dict) -> None:
        self._later(super().note, step, notes)

    def prune(self, newest: int) -> None:
        self._later(super().prune, newest)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.finish()

    def finish(self) -> None:
        """Waits for all that was begun.

        Raises:
          OSError: A checkpoint could not be written.
        """
        work, self._work = self._work, []
        for one in work:
            one.result()

    def not_finite(self, values: Mapping[str, Any]) -> str | None:
        bad = jax.device_get(_all_finite(dict(values)))
        return next((name for name, finite in bad.items() if not finite), None)

    def _later(self, function, *arguments):
        self._work.append(self._thread.submit(function, *arguments))

    def _written(self, step, notes):
        try:
            self._orbax.wait_until_finished()
        except (ValueError, OSError) as error:
            line = " ".join(str(error).split())
            raise OSError(f"the checkpoint {self._folder(step)} cannot be written: {line[:200]}") from error
        if self._chief:
            self._mark(step, notes)


@jax.jit
def _all_finite(values):
    return {name: jnp.isfinite(x).all() for name, x in values.items()}
