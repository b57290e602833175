"""Evaluates a model on a whole validation split."""

import functools
from collections.abc import Callable

import numpy as np
import orbit
import tensorflow as tf

from flash_tf.data.prepared_input import PreparedBatches
from flash_tf.data.stream import EvaluationBatches
from flash_tf.layers.traced_once import forward_only
from flash_tf.training.evaluation import summarize, token_sums
from flash_tf.training.trainer import round_up_names


class Evaluator(orbit.AbstractEvaluator):
    """Mean loss and perplexities over some evaluation batches.

    Args:
      model: A built language model.
      objective: Gives the negative log-likelihoods.
      strategy: The strategy of the model's variables.
      batches: Makes the batches of the split; called at the first evaluation.
      counts_words: Whether to compute the perplexity per word of the original text.
      on_progress: Called as `on_progress(done, total)` after each batch.
      jit_compile: Whether XLA compiles `sums` on each replica.
    """

    def __init__(
        self,
        *,
        model,
        objective,
        strategy,
        batches: Callable[[], EvaluationBatches | PreparedBatches],
        counts_words: bool,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        jit_compile: bool = False,
    ):
        self.strategy, self._make_batches = strategy, batches
        self._model, self._objective, self._on_progress = model, objective, on_progress
        self._counts_words = counts_words and objective.overlap == 1
        self._sums = tf.function(self.sums, jit_compile=True, autograph=False) if jit_compile else self.sums
        self._step = tf.function(self._all_replicas, autograph=False)

    @functools.cached_property
    def batches(self) -> EvaluationBatches | PreparedBatches:
        """The windows of the validation split. Their first use tokenizes it."""
        return self._make_batches()

    def evaluate(self, num_steps: tf.Tensor) -> dict[str, float]:
        """Evaluates all batches, and ignores `num_steps`; see `summarize`."""
        del num_steps
        total = sum(sums.numpy().astype(np.float64) for sums in self._results())
        return summarize(total[0], total[1:], self.batches.words if self._counts_words else None)

    def _results(self):
        """What the step gives for each batch."""
        iterator = iter(self.strategy.distribute_datasets_from_function(self._dataset))
        for done in range(len(self.batches)):
            yield self._step(next(iterator))
            self._on_progress(done + 1, len(self.batches))

    def _dataset(self, context):
        pipelines = context.num_input_pipelines
        dataset = self.batches.dataset(pipelines, context.input_pipeline_id)
        return per_replica(dataset, dataset.element_spec["tokens"].shape[0], context)

    def _all_replicas(self, batch):
        round_up_names()
        sums = self.strategy.run(self._sums, args=(batch,))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)

    def sums(self, batch):
        """The summed loss, then the number of times each token is a label: float32 `[1 + V]`."""
        with forward_only():
            return token_sums(self._objective, self._model, batch)


class TaskEvaluator(Evaluator):
    """The metrics of a task over all rows of a split; see `Evaluator` and `TaskObjective`."""

    def evaluate(self, num_steps: tf.Tensor) -> dict[str, float]:
        """Evaluates all rows, and ignores `num_steps`; see `TaskObjective.summarize`."""
        del num_steps
        parts = [{name: x.numpy() for name, x in outputs.items()} for outputs in self._results()]
        return self._objective.summarize({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _all_replicas(self, batch):
        round_up_names()
        outputs = self.strategy.run(self._sums, args=(batch,))
        return {name: self.strategy.gather(x, axis=0) for name, x in outputs.items()}

    def sums(self, batch):
        """The outputs of the rows of a replica."""
        with forward_only():
            return self._objective.outputs(self._model, batch, training=False)


def per_replica(dataset: tf.data.Dataset, batch_size: int, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Cuts a pipeline's batches of `batch_size` windows into one element for each of its replicas.

    tf.data tunes nothing in it: all buffers have a size.
    """
    replicas = context.num_replicas_in_sync // context.num_input_pipelines
    dataset = dataset if replicas == 1 else dataset.rebatch(batch_size // replicas)
    options = tf.data.Options()
    options.autotune.enabled = False  # the end of an iterator would wait for its thread
    return dataset.with_options(options)
