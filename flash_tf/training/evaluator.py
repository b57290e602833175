"""Validation: the whole split once, and what it says."""

import functools
import math
from collections.abc import Callable

import numpy as np
import orbit
import tensorflow as tf

from flash_tf.data.stream import EvaluationBatches


class Evaluator(orbit.AbstractEvaluator):
    """Mean loss and perplexities over some evaluation batches.

    Args:
      model: A built language model.
      objective: Gives the negative log-likelihoods.
      strategy: Under whose scope the model was made.
      batches: Makes the windows, each once; called at the first evaluation.
      counts_words: Whether to report perplexity per word of the original text.
      report: Called as `report(done, total)` after each batch.
    """

    def __init__(
        self,
        *,
        model,
        objective,
        strategy,
        batches: Callable[[], EvaluationBatches],
        counts_words: bool,
        report: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.strategy, self._make_batches = strategy, batches
        self._model, self._objective, self._report = model, objective, report
        self._counts_words = counts_words and objective.overlap == 1
        self._step = tf.function(self._all_replicas, autograph=False)

    @functools.cached_property
    def batches(self) -> EvaluationBatches:
        """The windows of the validation split, tokenised when first wanted."""
        return self._make_batches()

    def evaluate(self, num_steps: tf.Tensor) -> dict[str, float]:
        """Runs over all batches, whatever `num_steps` says; see `summarize`."""
        del num_steps
        dataset = self.strategy.distribute_datasets_from_function(self._dataset)
        iterator, total = iter(dataset), 0.0
        for done in range(len(self.batches)):
            total = total + self._step(next(iterator)).numpy().astype(np.float64)
            self._report(done + 1, len(self.batches))
        return summarize(total[0], total[1:], self.batches.words if self._counts_words else None)

    def _dataset(self, context):
        batches, pipelines = self.batches, context.num_input_pipelines
        first = next(iter(batches))
        signature = {name: tf.TensorSpec(x.shape, tf.int32) for name, x in first.items()}
        rows = len(first["tokens"]) // pipelines
        begin = context.input_pipeline_id * rows
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
        dataset = dataset.map(lambda batch: {name: x[begin : begin + rows] for name, x in batch.items()})
        return per_replica(dataset, rows, context)

    def _all_replicas(self, batch):
        sums = self.strategy.run(self.sums, args=(batch,))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)

    def sums(self, batch):
        """The summed loss, then how often each token of the vocabulary was to be predicted: float32 `[1 + V]`."""
        prediction = self._objective(self._model, batch, training=False)
        counts = tf.math.unsorted_segment_sum(
            tf.reshape(prediction.weights, [-1]), tf.reshape(prediction.labels, [-1]), self._model.vocabulary_size
        )
        loss = tf.reduce_sum(tf.where(prediction.weights > 0, prediction.nll * prediction.weights, 0.0))
        return tf.concat([loss[None], counts], axis=0)


def per_replica(dataset: tf.data.Dataset, rows: int, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Cuts a pipeline's batches of `rows` into one element for each of its replicas."""
    replicas = context.num_replicas_in_sync // context.num_input_pipelines
    return dataset if replicas == 1 else dataset.rebatch(rows // replicas)


def summarize(nll: float, label_counts: np.ndarray, words: int | None) -> dict[str, float]:
    """What an evaluation reports.

    Args:
      nll: Total negative log-likelihood, in nats.
      label_counts: How often each token was to be predicted, `[V]`.
      words: Words of the original text, where perplexity per word is wanted.

    Returns:
      `loss` in nats a token; `perplexity`, its exponential; `unigram_perplexity`, the best that any model blind to
      context can do on these very tokens: the exponential of their entropy; `tokens`, how many were predicted; and
      `word_perplexity`, exp(nll / words), with `words`.
    """
    tokens = label_counts.sum()
    shares = label_counts[label_counts > 0] / tokens
    result = {
        "loss": nll / tokens,
        "perplexity": _exp(nll / tokens),
        "unigram_perplexity": _exp(-(shares * np.log(shares)).sum()),
        "tokens": int(tokens),
    }
    return result if words is None else {**result, "word_perplexity": _exp(nll / words), "words": words}


def _exp(x):
    return float(math.exp(x)) if x < 700 else math.inf
