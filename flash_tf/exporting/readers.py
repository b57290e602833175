"""What a signature reads, text or ids, as rows that are padded on the right; and what it says of a bad request."""

from typing import NamedTuple

import tensorflow as tf
import tensorflow_text

from flash_tf.data import visible
from flash_tf.data.tokenizer import MASK, Tokenizer


class Rows(NamedTuple):
    """A batch of texts.

    Attributes:
      ids: int32 `[b, n]`, padded on the right.
      lengths: int32 `[b]`, at least 1.
      real: bool `[b, n]`, False at padding.
    """

    ids: tf.Tensor
    lengths: tf.Tensor
    real: tf.Tensor


def checked(x: tf.Tensor, *needs: tuple) -> tf.Tensor:
    """`x`, once every need is met: `(condition, message, what came)` each. Else the request fails with the message."""
    with tf.control_dependencies(
        [tf.debugging.Assert(need, [message, *got], summarize=8) for need, message, *got in needs]
    ):
        return tf.identity(x)


class IdReader:
    """Reads ids that are padded on the right with `pad_id`.

    Args:
      tokenizer: The model's.
      longest: The most tokens of a row.
    """

    spec = tf.TensorSpec([None, None], tf.int32, "ids")

    def __init__(self, tokenizer: Tokenizer, longest: int):
        self._size, self._pad, self._longest = tokenizer.vocabulary_size, tokenizer.pad_id, longest

    def read(self, ids: tf.Tensor) -> Rows:
        """Ids `[b, n]` as rows without columns of padding alone; the request fails if they are none that can be."""
        real = ids != self._pad
        lengths = tf.reduce_sum(tf.cast(real, tf.int32), axis=1)
        known = tf.reduce_all((ids >= 0) & (ids < self._size))
        gapless = tf.reduce_all(real == tf.sequence_mask(lengths, tf.shape(ids)[1]))
        ids = checked(
            ids,
            (known, f"ids must be from 0 to {self._size - 1}, got", tf.reduce_min(ids), tf.reduce_max(ids)),
            (gapless, f"padding, id {self._pad}, must be at the end of a row only, got", ids),
        )
        return self._within(ids, lengths)

    def known(self, token: tf.Tensor) -> tuple:
        """The need that ids are in the vocabulary, for `checked`."""
        good = tf.reduce_all((token >= 0) & (token < self._size))
        return good, f"a token must be an id from 0 to {self._size - 1}, got", token

    def _within(self, ids, lengths):
        # Whatever follows is made of checked lengths, or it might fail before the checks do.
        lengths = checked(
            lengths,
            (tf.size(lengths) > 0, "a request needs one row or more, got", tf.shape(lengths)),
            (tf.reduce_all(lengths > 0), "each row needs a token, got rows of lengths", lengths),
            (tf.reduce_all(lengths <= self._longest), f"a row may have {self._longest} tokens, got", lengths),
        )
        longest = tf.reduce_max(lengths)
        ids = ids[:, :longest]
        return Rows(ids, lengths, tf.sequence_mask(lengths, longest))


class TextReader(IdReader):
    """Reads texts, as `Tokenizer.encode_with_masks` does, and writes them, as `Tokenizer.decode` does.

    Args:
      tokenizer: The model's.
      model: Its file's bytes.
      longest: The most tokens of a row.
    """

    spec = tf.TensorSpec([None], tf.string, "text")
    CHUNK = r"(?s)(.{512}.{511}.*?[^▁][ \n])"  # where `Tokenizer.encode` cuts; RE2 repeats a thousand times at most
    CUT = "\0flash-tf\0"  # between chunks; no text that means something has it

    def __init__(self, tokenizer: Tokenizer, model: bytes, longest: int):
        super().__init__(tokenizer, longest)
        self._fast = tensorflow_text.FastSentencepieceTokenizer(model)
        self._mask, self._unknown, self._special = tokenizer.mask_id, tokenizer.unk_id, tokenizer.special_ids
        self._pieces = [tokenizer.piece(i) for i in range(tokenizer.vocabulary_size)]
        self._spelled, self._keep = tokenizer.spelled, tokenizer.keeps_whitespace

    def read(self, text: tf.Tensor, masks: bool = False) -> Rows:
        """Texts `[b]` as rows; with `masks` each literal `<mask>` is one, else it is text as any other."""
        if self._keep:
            text = tf.strings.regex_replace(visible.visible(text), f"▁{MASK}", MASK) if masks else visible.visible(text)
        parts = tf.strings.split(text, MASK) if masks else tf.RaggedTensor.from_tensor(text[:, None])
        chunk, cut = ("▁", f"{self.CUT}▁") if self._keep else (self.CHUNK, rf"\1{self.CUT}")
        chunks = tf.strings.split(tf.strings.regex_replace(parts.flat_values, chunk, cut), self.CUT)
        ids = self._fast.tokenize(chunks.flat_values)
        special = tf.reduce_any([ids.flat_values == i for i in self._special], axis=0)
        values = tf.where(special, self._unknown, ids.flat_values)
        ids = tf.RaggedTensor.from_row_splits(values, tf.gather(ids.row_splits, chunks.row_splits))  # of each part
        opened = tf.concat([tf.fill([ids.nrows(), 1], self._mask), ids], axis=1)  # of a row's first part it is none
        rows = tf.RaggedTensor.from_row_splits(opened.flat_values, tf.gather(opened.row_splits, parts.row_splits))
        rows = rows[:, 1:]
        lengths = tf.cast(rows.row_lengths(), tf.int32)
        return self._within(rows.to_tensor(self._pad), lengths)

    def write(self, ids: tf.Tensor) -> tf.Tensor:
        """Ids `[..., n]` -> texts `[...]`."""
        spelled = tf.strings.reduce_join(tf.gather(tf.constant(self._spelled), ids), axis=-1)
        if self._keep:
            return tf.reshape(visible.restored(tf.reshape(spelled, [-1])), tf.shape(spelled))
        return tf.strings.strip(tf.strings.regex_replace(spelled, "▁", " "))

    def pieces(self, ids: tf.Tensor) -> tf.Tensor:
        """Each id's piece, as the vocabulary spells it."""
        return tf.gather(tf.constant(self._pieces), ids)
