"""What every exported language model answers, as functions of tensors, a signature each."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from flash_tf.data.tokenizer import Tokenizer
from flash_tf.exporting.readers import IdReader, Rows, TextReader


class Limits(NamedTuple):
    """What is fixed when a model is exported.

    Attributes:
      longest: The most tokens of a row; of a cache that grows, its capacity.
      new_tokens: How many `generate` adds at most.
      top_k: Candidates of `fill_mask` for each mask.
    """

    longest: int
    new_tokens: int
    top_k: int


class Served(tf.Module):
    """A model with what its signatures need. A subclass has `endpoints`, and a method for each.

    Args:
      model: The model.
      tokenizer: Its tokenizer.
      reader: How requests are read: `TextReader`, or `IdReader` for an export without the tokenizer.
      limits: Of requests.
    """

    def __init__(self, model: keras.Model, tokenizer: Tokenizer, reader: IdReader, limits: Limits):
        super().__init__(name="served")
        self.model_weights = {weight.path.replace("/", "."): weight.value for weight in model.weights}
        self._model, self._tokenizer, self._reader, self._limits = model, tokenizer, reader, limits
        self._ids = IdReader(tokenizer, limits.longest)

    def endpoints(self) -> dict[str, tuple[Callable, list[tf.TensorSpec]]]:
        """Each signature's function and what it takes, the most wanted one first."""
        given = [self._reader.spec]
        return {"embed": (self.embed, given), "score": (self.score, given), "logits": (self.logits, [IdReader.spec])}

    @property
    def writes(self) -> bool:
        """Whether answers have text."""
        return isinstance(self._reader, TextReader)

    def embed(self, given):
        """Text or ids -> `embedding [b, d]`: the mean of the last layer over a row's tokens."""
        rows = self._reader.read(given)
        x = tf.cast(self._encode(rows.ids, rows.real), tf.float32)
        x = tf.where(rows.real[..., None], x, 0.0)
        return {"embedding": tf.reduce_sum(x, axis=1) / tf.cast(rows.lengths, tf.float32)[:, None]}

    def score(self, given):
        """Text or ids -> `log_likelihood [b]`, its `tokens [b]`, and `token_log_likelihoods [b, n]`, 0 at padding."""
        rows = self._reader.read(given)
        each = tf.where(rows.real, self._log_likelihoods(rows), 0.0)
        return {
            "log_likelihood": tf.reduce_sum(each, axis=1),
            "tokens": rows.lengths,
            "token_log_likelihoods": each,
        }

    def logits(self, ids):
        """Ids `[b, n]` -> `logits [b, n, V]`, which mean nothing at padding."""
        rows = self._ids.read(ids)
        logits = self._head(self._encode(rows.ids, rows.real))
        return {"logits": tf.pad(logits, [[0, 0], [0, tf.shape(ids)[1] - tf.shape(rows.ids)[1]], [0, 0]])}

    def plain_logits(self, ids):
        """Ids `[b, n]`, all of them real -> logits `[b, n, V]`; nothing is checked."""
        return self._head(self._model.encode(ids, training=False))

    def _log_likelihoods(self, rows: Rows) -> tf.Tensor:
        """The log-likelihood of each token, float32 `[b, n]`."""
        raise NotImplementedError

    def _encode(self, ids, real, **options):
        return self._model.encode(ids, padding_mask=real, training=False, **options)

    def _head(self, x):
        return tf.cast(self._model.head(x), tf.float32)


def log_likelihoods(logits: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Of ids `[...]` under logits `[..., V]`."""
    return -tf.nn.sparse_softmax_cross_entropy_with_logits(ids, logits)
