"""Reads the texts or ids of a request into a padded batch, and refuses bad requests."""

from typing import NamedTuple

import tensorflow as tf

from flash_tf.data.tokenizer import MASK, Tokenizer
from flash_tf.exporting.graph_tokenizers import graph_tokenizer


class TextBatch(NamedTuple):
    """The tokens of a batch of texts.

    Attributes:
      ids: int32 `[b, n]`, padded on the right.
      lengths: int32 `[b]`, at least 1.
      real: bool `[b, n]`, False at padding.
    """

    ids: tf.Tensor
    lengths: tf.Tensor
    real: tf.Tensor


def checked(x: tf.Tensor, *needs: tuple) -> tf.Tensor:
    """Gives `x` if every need `(condition, message, finding)` is met. Else the request fails with the message."""
    with tf.control_dependencies(
        [tf.debugging.Assert(need, [message, *got], summarize=8) for need, message, *got in needs]
    ):
        return tf.identity(x)


class IdReader(tf.Module):
    """Reads ids that are padded on the right with `pad_id`.

    Args:
      tokenizer: The model's tokenizer.
      longest: The most tokens of a text.
    """

    spec = tf.TensorSpec([None, None], tf.int32, "ids")

    def __init__(self, tokenizer: Tokenizer, longest: int):
        super().__init__()
        self._size, self._pad, self._longest = tokenizer.vocabulary_size, tokenizer.pad_id, longest

    def read(self, ids: tf.Tensor) -> TextBatch:
        """Reads ids `[b, n]`, and drops columns of padding alone. The request fails if the ids are not valid."""
        width = tf.shape(ids)[1]
        need = f"a row may have at most {self._longest} ids, padding included, got"
        ids = checked(ids, (width <= self._longest, need, width))
        real = ids != self._pad
        lengths = tf.reduce_sum(tf.cast(real, tf.int32), axis=1)
        known = tf.reduce_all((ids >= 0) & (ids < self._size))
        gapless = tf.reduce_all(real == tf.sequence_mask(lengths, tf.shape(ids)[1]))
        ids = checked(
            ids,
            (known, f"ids must be from 0 to {self._size - 1}, got", tf.reduce_min(ids), tf.reduce_max(ids)),
            (gapless, f"padding, id {self._pad}, must be at the end of a text only, got", ids),
        )
        return self._within(ids, lengths)

    def known(self, token: tf.Tensor) -> tuple:
        """The need for `checked` that ids are in the vocabulary."""
        good = tf.reduce_all((token >= 0) & (token < self._size))
        return good, f"a token must be an id from 0 to {self._size - 1}, got", token

    def _within(self, ids, lengths):
        # All later operations depend on checked lengths. Else they could fail before the checks.
        lengths = checked(
            lengths,
            (tf.size(lengths) > 0, "a request needs one text or more, got", tf.shape(lengths)),
            (tf.reduce_all(lengths > 0), "each text needs a token, got texts of lengths", lengths),
            (tf.reduce_all(lengths <= self._longest), f"a text may have at most {self._longest} tokens, got", lengths),
        )
        longest = tf.reduce_max(lengths)
        ids = ids[:, :longest]
        return TextBatch(ids, lengths, tf.sequence_mask(lengths, longest))


class TextReader(IdReader):
    """Reads texts like `Tokenizer.encode_with_masks`, and writes them like `Tokenizer.decode`.

    Args:
      tokenizer: The model's tokenizer.
      longest: The most tokens of a text.
    """

    spec = tf.TensorSpec([None], tf.string, "text")

    def __init__(self, tokenizer: Tokenizer, longest: int):
        super().__init__(tokenizer, longest)
        self._graph, self._tokenizer = graph_tokenizer(tokenizer), tokenizer
        self._mask = tokenizer.mask_id
        self._pieces = [tokenizer.piece(i) for i in range(tokenizer.vocabulary_size)]

    def read(self, text: tf.Tensor, masks: bool = False) -> TextBatch:
        """Reads texts `[b]`. With `masks` each literal `<mask>` is a mask, else it is ordinary text."""
        text = self._graph.prepared(text)
        between = tf.RaggedTensor.from_tensor(text[:, None])
        if masks:
            between = tf.strings.split(self._graph.masked(text), MASK)
        ids = self._graph.encode(between.flat_values)  # between masks
        opened = tf.concat([tf.fill([ids.nrows(), 1], self._mask), ids], axis=1)
        whole = tf.RaggedTensor.from_row_splits(opened.flat_values, tf.gather(opened.row_splits, between.row_splits))
        whole = whole[:, 1:]  # without the mask before a text
        lengths = tf.cast(whole.row_lengths(), tf.int32)
        return self._within(whole.to_tensor(self._pad), lengths)

    def encode(self, text: tf.Tensor) -> tf.RaggedTensor:
        """Texts `[k]` -> int32 ids `[k, (n)]`, without checks: a text may have no token."""
        return self._graph.encode(self._graph.prepared(text))

    def encode_words(self, words: tf.Tensor) -> tf.RaggedTensor:
        """The words of one text, `[k]` -> int32 ids `[k, (n)]`; see `Tokenizer.encode_words`."""
        if not self._tokenizer.joins:
            return self.encode(words)
        return self._graph.encode(tf.concat([words[:1], tf.strings.join([" ", words[1:]])], 0))

    def write(self, ids: tf.Tensor) -> tf.Tensor:
        """Ids `[..., n]` -> texts `[...]`."""
        return self._graph.decode(ids)

    def pieces(self, ids: tf.Tensor) -> tf.Tensor:
        """The piece of each id, in the spelling of the vocabulary."""
        return tf.gather(tf.constant(self._pieces), ids)
