"""The loop of training steps inside one tf.function."""

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
    """

    def __init__(self, *, step: TrainStep, strategy: tf.distribute.Strategy, global_step: tf.Variable, dataset):
        self.model, self.strategy, self.global_step = step.model, strategy, global_step
        self.history = None  # [steps, COLUMNS] of the last loop
        self.step, self._iterator = step, iter(dataset)
        self._loop = tf.function(self._steps)

    def train(self, num_steps: tf.Tensor) -> dict:
        """Runs `num_steps` steps; returns the means of their records."""
        self.history = self._loop(self._iterator, num_steps).numpy()
        return dict(zip(COLUMNS, self.history.mean(axis=0), strict=True))

    def _steps(self, iterator, num_steps):
        history = tf.TensorArray(tf.float32, size=num_steps, element_shape=[len(COLUMNS)])
        for i in tf.range(num_steps):
            record = self.strategy.run(self.step, args=(next(iterator), self.global_step.read_value()))
            history = history.write(i, self.strategy.experimental_local_results(record)[0])
            self.global_step.assign_add(1)
        return history.stack()
