"""The loop of steps on JAX, and the evaluation of its weights."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from flash_tf.data.packing import Batch
from flash_tf.training.evaluation import summarize
from flash_tf.training.on_jax.step import State, Step
from flash_tf.training.tasks import TaskObjective
from flash_tf.training.update import COLUMNS, LOOP_SECONDS


class Trainer:
    """Runs training steps. The host reads the next batch while the devices work on the last one.

    Args:
      step: The step.
      state: The state of the run. It is taken over.
      done: Steps done, a variable.
      read: `read(position, count)` gives the windows from a position on.

    Attributes:
      state: The state after the last step.
      history: The records of the last loop, `[steps, COLUMNS]`.
      waiting: Share of the last loop's time in which the devices waited for input.
      reading: Whether the loop reads a batch.
    """

    several = property(lambda self: jax.process_count() > 1)

    def __init__(self, *, step: Step, state: State, done: Any, read: Callable[[int, int], Batch]):
        self.step, self.state, self.global_step, self._read = step, state, done, read
        self.model, self.config = step.model, step.config
        self.history, self.waiting, self.reading, self.around = None, 0.0, False, contextlib.nullcontext
        self._seconds = self._run = None

    @property
    def steps_per_loop(self) -> int:
        """Steps of the next loop: as many as LOOP_SECONDS allow, and one while the time of a step is unknown."""
        most = self.config.train.steps_per_loop
        return 1 if self._seconds is None else max(1, min(most, int(LOOP_SECONDS / self._seconds)))

    @property
    def means(self) -> dict[str, float]:
        """The last loop's records on average, and its rate."""
        return {**dict(zip(COLUMNS, self.history.mean(axis=0), strict=True)), "steps_per_second": 1 / self._seconds}

    def largest(self, value: float) -> float:
        """The largest of all processes' values. Each process calls it."""
        return float(np.max(multihost_utils.process_allgather(np.float32(value)))) if self.several else value

    def train(self, num_steps: int) -> None:
        """Runs `num_steps` steps, or fewer if data cannot be read: then the next loop raises the error."""
        first, records, waited = int(self.global_step.numpy()), [], 0.0
        start = time.perf_counter()
        for step in range(first, first + num_steps):
            try:
                batch, seconds = self._next(step)
            except Exception:
                if not records or self.several:
                    raise
                break
            if not records or records[-1].is_ready():
                waited += seconds
            if self._run is None:
                self._run = self.step.program(batch)
                start = time.perf_counter()
            self.state, record = self._run(self.state, batch, np.uint32(step))
            records.append(record)
            self.global_step.assign(step + 1)
        self.history = np.stack(jax.device_get(records))
        seconds = time.perf_counter() - start
        self.waiting = waited / seconds
        self._seconds = self.largest(seconds / len(records))

    def _next(self, step):
        """The batch of a step, and the seconds that it took to read."""
        start, rows = time.perf_counter(), self.config.batch_size
        self.reading = not self.several  # where no process saves alone
        batch = sharded(self.step.rows, rows, lambda first, count: self._read(step * rows + first, count))
        self.reading = False
        return batch, time.perf_counter() - start


def sharded(sharding: jax.sharding.NamedSharding, rows: int, read: Callable[[int, int], Batch]) -> dict[str, jax.Array]:
    """A batch on the mesh. This process reads the rows of its own devices alone.

    Args:
      sharding: Of the rows.
      rows: Rows of the whole batch.
      read: `read(first, count)` gives some of its rows.
    """
    places = sharding.addressable_devices_indices_map((rows,))
    bounds = {device: index[0].indices(rows)[:2] for device, index in places.items()}
    parts = {bound: read(bound[0], bound[1] - bound[0]) for bound in sorted(set(bounds.values()))}
    return {
        name: jax.make_array_from_single_device_arrays(
            (rows, *x.shape[1:]),
            sharding,
            [jax.device_put(parts[bound][name], device) for device, bound in bounds.items()],
        )
        for name, x in next(iter(parts.values())).items()
    }


class Evaluator:
    """The figures of the validation split for the weights of a trainer.

    Args:
      trainer: The trainer.
      batches: Makes the batches of the split; called at the first evaluation.
      counts_words: Whether to compute the perplexity per word of the original text.
      on_progress: Called as `on_progress(done, total)` after each batch.
    """

    def __init__(
        self, trainer: Trainer, batches: Callable, counts_words: bool, on_progress: Callable[[int, int], None]
    ):
        self._trainer, self._make, self._on_progress, self._batches = trainer, batches, on_progress, None
        self._objective = trainer.step.objective
        self._counts_words = counts_words and self._objective.overlap == 1

    def evaluate(self) -> dict[str, float]:
        """Evaluates all batches; see `evaluation.summarize` and `TaskObjective.summarize`."""
        self._batches = self._batches or self._make()
        step = self._trainer.step
        if isinstance(self._objective, TaskObjective):
            found = list(self._results(step.outputs))
            return self._objective.summarize({name: np.concatenate([one[name] for one in found]) for name in found[0]})
        total = sum(sums.astype(np.float64) for sums in self._results(step.sums))
        return summarize(total[0], total[1:], self._batches.words if self._counts_words else None)

    def _results(self, function):
        for done, batch in enumerate(self._batches, 1):
            rows, place = len(batch["tokens"]), self._trainer.step.rows
            part = lambda first, count: {name: x[first : first + count] for name, x in batch.items()}  # noqa: B023, E731
            result = function(self._trainer.state, sharded(place, rows, part))
            several = self._trainer.several
            yield multihost_utils.process_allgather(result, tiled=True) if several else jax.device_get(result)
            self._on_progress(done, len(self._batches))
