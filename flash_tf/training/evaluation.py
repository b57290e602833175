"""The figures of an evaluation, on any backend."""

import math

import keras
import numpy as np
from keras import ops

from kernels_xla.common.spec import Tensor


def token_sums(objective, model: keras.Model, batch: dict[str, Tensor]) -> Tensor:
    """The summed loss of a batch, then the number of times each token is a label: float32 `[1 + V]`."""
    prediction = objective(model, batch, training=False)
    counts = ops.segment_sum(
        ops.reshape(prediction.weights, (-1,)), ops.reshape(prediction.labels, (-1,)), model.vocabulary_size
    )
    loss = ops.sum(ops.where(prediction.weights > 0, prediction.nll * prediction.weights, 0.0))
    return ops.concatenate([ops.reshape(loss, (1,)), counts], axis=0)


def summarize(nll: float, label_counts: np.ndarray, words: int | None) -> dict[str, float]:
    """The figures of an evaluation.

    Args:
      nll: Total negative log-likelihood, in nats.
      label_counts: The number of times each token is a label, `[V]`.
      words: Words of the original text; None to leave out the perplexity per word.

    Returns:
      `loss`, in nats a token; `perplexity`, its exponential; `unigram_perplexity`, the exponential of the tokens'
      entropy, which no model without context can beat on these tokens; `tokens`, the number of predicted tokens; with
      `words` also `word_perplexity`, exp(nll / words), and `words`.
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
