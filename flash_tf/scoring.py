"""The log-likelihood of documents of any length under a causal language model, in constant memory."""

from collections.abc import Iterable, Iterator

import keras
import numpy as np
from keras import ops

from flash_tf.data.tokenizer import Tokenizer
from flash_tf.generation.generator import compiled

BLOCK = 512  # tokens that the model reads at a time


def score(model: keras.Model, tokenizer: Tokenizer, documents: Iterable[str], context: int) -> Iterator[dict]:
    """Scores documents one after the other, from the first token to the end-of-document token after the last.

    The model reads an end-of-document token first, as in training on concatenated documents. A model with a constant
    state reads the whole document. A model with a cache reads it in stretches of `context` tokens, each from an empty
    cache.

    Args:
      model: A causal language model.
      tokenizer: The model's tokenizer.
      documents: The texts.
      context: Tokens that a model with a cache reads together: the sequence length of its training.

    Yields:
      For each document `log_likelihood` in nats, `tokens`, the number of predicted tokens, and `words`, the number of
      words between blanks.

    Raises:
      ValueError: The model is not causal or cannot stream, or a document has no token.
    """
    if not model.causal:
        raise ValueError(f"score needs a causal language model, got {type(model).__name__}")
    reader = _Reader(model, context if model.grows or model.max_length is not None else None)
    for number, document in enumerate(documents, 1):
        ids = tokenizer.encode([document])[0]
        if not len(ids):
            raise ValueError(f"document {number} has no tokens: {document[:40]!r}")
        end = np.array([tokenizer.eos_id], np.int32)
        found = reader.log_likelihood(np.concatenate([end, ids, end]))
        yield {"log_likelihood": found, "tokens": len(ids) + 1, "words": len(document.split())}


class _Reader:
    """Sums log-probabilities block by block. It is compiled for blocks of one size."""

    def __init__(self, model, context):
        self._model, self._context = model, context
        self._block = BLOCK if context is None else min(BLOCK, context)
        self._program = None

    def log_likelihood(self, ids: np.ndarray) -> float:
        """The log-likelihood of all tokens after the first."""
        total, state, read = 0.0, None, 0
        for start in range(0, len(ids) - 1, self._block):
            if state is None or (self._context is not None and read + self._block > self._context):
                state, read = self._model.initial_state(1, self._context if self._model.grows else None), 0
            inputs, labels = ids[start : start + self._block], ids[start + 1 : start + self._block + 1]
            block = [np.pad(x, (0, self._block - len(x)))[None] for x in (inputs, labels)]
            arrays = [ops.convert_to_tensor(x, "int32") for x in (*block, [len(labels)])]
            if self._program is None:
                self._program = compiled(self._model, self._sum, *arrays, state)
            found, state = self._program(*arrays, state)
            total += float(ops.convert_to_numpy(found))
            read += self._block
        return total

    def _sum(self, ids, labels, valid, state):
        logits, state = self._model.extend(ids, state, valid)
        logits = ops.cast(logits, "float32")
        found = ops.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] - ops.logsumexp(logits, axis=-1)
        real = ops.arange(ids.shape[1], dtype="int32") < valid[:, None]
        return ops.sum(ops.where(real, found, 0.0)), state
