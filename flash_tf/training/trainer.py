"""The loop of training steps inside one tf.function."""

import contextlib
import time

import orbit
import tensorflow as tf

from flash_tf.training.step import COLUMNS, TrainStep


class Trainer(orbit.AbstractTrainer):
    """Runs a training step on every replica, `num_steps` times without a return to Python.

    Args:
      step: The step.
      strategy: Under whose scope its variables were made.
      global_step: Steps done.
      dataset: Distributed; gives each replica its share of the batch.

    Attributes:
      history: `[steps, COLUMNS]` of the last loop.
      waiting: Share of the last loop's time that the step waited for input.
      around: Makes a context that each loop runs in.
    """

    def __init__(self, *, step: TrainStep, strategy: tf.distribute.Strategy, global_step: tf.Variable, dataset):
        self.model, self.strategy, self.global_step = step.model, strategy, global_step
        self.history, self.waiting, self.around = None, 0.0, contextlib.nullcontext
        self.step, self._iterator = step, iter(dataset)
        self._loop = tf.function(self._steps)

    def train(self, num_steps: tf.Tensor) -> dict:
        """Runs `num_steps` steps; returns the means of their records."""
        start = time.time()  # of tf.timestamp's clock
        with self.around():
            history, waited, last = self._loop(self._iterator, num_steps)
            self.history = history.numpy()
        self.waiting = _waiting(waited.numpy(), start, last.numpy(), time.time(), len(self.history))
        return dict(zip(COLUMNS, self.history.mean(axis=0), strict=True))

    def _steps(self, iterator, num_steps):
        """The records, the seconds that steps waited for their batch, and when the last batch came."""
        history = tf.TensorArray(tf.float32, size=num_steps, element_shape=[len(COLUMNS)])
        waited, came = tf.zeros((), tf.float64), tf.zeros((), tf.float64)
        for i in tf.range(num_steps):
            batch, asked, came = _timed(iterator)
            waited += came - asked
            record = self.strategy.run(self.step, args=(batch, self.global_step.read_value()))
            history = history.write(i, self.strategy.experimental_local_results(record)[0])
            self.global_step.assign_add(1)
        return history.stack(), waited, came


def _timed(iterator):
    """The next batch, when it was asked for and when it came, in seconds since 1970.

    Nothing that needs the batch begins before the time is taken, or the time would be taken after some of it.
    """
    asked = tf.timestamp()
    with tf.control_dependencies([asked]):
        batch = next(iterator)
    with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
        came = tf.timestamp()
    with tf.control_dependencies([came]):
        return tf.nest.map_structure(_in_place, batch, expand_composites=True), asked, came


def _in_place(x):
    with tf.device(x.device):  # of its replica
        return tf.identity(x)


def _waiting(waited, start, came, end, steps):
    """Share of a loop that its steps waited for input, without what devices had still to do meanwhile.

    An accelerator works through a queue that the host fills ahead of it. What is left of the queue when the last batch
    has come shows how far: one step if every step waited, all of them if none had to.
    """
    seconds = end - start
    idle = seconds - steps * (end - came) if tf.config.list_logical_devices("GPU") else seconds
    return float(max(0.0, min(waited, idle)) / seconds)
