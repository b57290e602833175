"""Tokenizers as operators of TensorFlow, which a SavedModel holds. They give the ids of `flash_tf.data.tokenizers`."""

import tensorflow as tf
import tensorflow_text

from flash_tf.data import visible
from flash_tf.data.tokenizer import MASK, SPACES, Tokenizer
from flash_tf.data.tokenizers.byte_level import ALPHABET, ByteLevel
from flash_tf.data.tokenizers.sentence_piece import SentencePiece
from flash_tf.data.tokenizers.word_level import END_OF_LINE, WordLevel

CUT = "\0flash-tf\0"  # between stretches of text; no meaningful text has it


def graph_tokenizer(tokenizer: Tokenizer) -> "GraphTokenizer":
    """The operators of a tokenizer; ValueError if there are none for its kind."""
    check_tokenizer(tokenizer)
    kinds = {SentencePiece: SentencePieceOperators, ByteLevel: ByteLevelOperators, WordLevel: WordOperators}
    return kinds[type(tokenizer)](tokenizer)


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raises a ValueError if there are no operators for a tokenizer of this kind."""
    if type(tokenizer) not in (SentencePiece, ByteLevel, WordLevel):
        raise ValueError(
            "an export holds a SentencePiece model, byte-level BPE that splits text as GPT-2 does, or words, and no "
            "other tokenizer.json: train with the model's tokenizer.model, if it has one, or export with --ids-only"
        )


class GraphTokenizer(tf.Module):
    """What every kind does; `Tokenizer` has the same parts in Python."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer, self._spelled = tokenizer, tokenizer.spelled

    def prepared(self, text: tf.Tensor) -> tf.Tensor:
        """Texts `[b]` as `encode` reads them."""
        return text

    def masked(self, text: tf.Tensor) -> tf.Tensor:
        """Prepared texts `[b]` in which each `<mask>` includes the blank before it."""
        return text

    def encode(self, text: tf.Tensor) -> tf.RaggedTensor:
        """Prepared texts `[k]` -> int32 ids `[k, (n)]`."""
        raise NotImplementedError

    def decode(self, ids: tf.Tensor) -> tf.Tensor:
        """Ids `[..., n]` -> texts `[...]`."""
        spelled = tf.strings.reduce_join(tf.gather(tf.constant(self._spelled), ids), axis=-1)
        return tf.strings.unicode_transcode(self._finished(spelled), "UTF-8", "UTF-8")

    def _finished(self, spelled: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError


class SentencePieceOperators(GraphTokenizer):
    """The operators of TF-Text: the fast one for the models that it reads as SentencePiece does."""

    CHUNK = r"(?s)(.{512}.{511}.*?[^▁][ \n])"  # `Tokenizer.encode` cuts here too; RE2 repeats at most a thousand times

    def __init__(self, tokenizer: SentencePiece):
        super().__init__(tokenizer)
        operator = "FastSentencepieceTokenizer" if tokenizer.fast else "SentencepieceTokenizer"
        self._operator = getattr(tensorflow_text, operator)(tokenizer.graph_model)

    def prepared(self, text):
        return visible.visible(text) if self._tokenizer.visibly else text

    def masked(self, text):
        if self._tokenizer.spaced:
            return text
        text = tf.strings.regex_replace(text, f"{'▁' if self._tokenizer.visibly else ' '}{MASK}", MASK)
        return tf.strings.regex_replace(text, f"{MASK} ", MASK) if self._tokenizer.prefixed else text

    def encode(self, text):
        if self._tokenizer.visibly:
            text = tf.strings.regex_replace(text, "▁", f"{CUT}▁")
        elif self._tokenizer.spaced:
            text = tf.strings.regex_replace(text, self.CHUNK, rf"\1{CUT}")
        chunks = tf.strings.split(text, CUT)
        ids = self._operator.tokenize(chunks.flat_values)
        special = tf.reduce_any([ids.flat_values == i for i in self._tokenizer.special_ids], axis=0)
        values = tf.where(special, self._tokenizer.unk_id, ids.flat_values)
        return tf.RaggedTensor.from_row_splits(values, tf.gather(ids.row_splits, chunks.row_splits))

    def _finished(self, spelled):
        if self._tokenizer.visibly:
            return tf.reshape(visible.restored(tf.reshape(spelled, [-1])), tf.shape(spelled))
        if self._tokenizer.strips:
            return tf.strings.regex_replace(spelled, "^ +| +$", "")
        return tf.strings.regex_replace(spelled, "^ ", "") if self._tokenizer.prefixed else spelled


class ByteLevelOperators(GraphTokenizer):
    """Merges of bytes, for all words of a batch at once: each turn merges the first pair of each word.

    KerasHub's operators (0.32) do not stand here: they lose the character `६`, their own mark, and keep all words that
    they have seen.
    """

    # Of GPT-2, for a text that is cut before the last blank of each run: RE2 does not look ahead.
    WORD = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^{SPACES}\p{{L}}\p{{N}}]+|[{SPACES}]+"

    def __init__(self, tokenizer: ByteLevel):
        super().__init__(tokenizer)
        ids = {piece: i for i, piece in enumerate(tokenizer._pieces)}
        self._bytes = [ids[ALPHABET[byte]] for byte in range(256)]
        size = tokenizer.vocabulary_size
        self._size, self._unmerged = size, len(tokenizer.merges)
        self._merged = [ids[first + second] for first, second in tokenizer.merges]
        pairs = [ids[first] * size + ids[second] for first, second in tokenizer.merges]
        self._ranks = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(pairs, range(len(pairs)), tf.int64, tf.int64), self._unmerged
        )

    def prepared(self, text):
        if self._tokenizer.collapses:
            text = tf.strings.regex_replace(tf.strings.regex_replace(text, f"[{SPACES}]+", " "), "^ | $", "")
        return text

    def masked(self, text):
        return tf.strings.regex_replace(text, f" {MASK}", MASK)

    def encode(self, text):
        if self._tokenizer.prefixed:
            text = tf.strings.regex_replace(text, "^([^ ])", r" \1")
        text = tf.strings.regex_replace(text, f"([{SPACES}][^{SPACES}])", rf"{CUT}\1")
        stretches = tf.strings.split(text, CUT)
        words = tensorflow_text.regex_split(stretches.flat_values, self.WORD, self.WORD)
        text_ends = tf.gather(words.row_splits, stretches.row_splits)
        pieces = tf.io.decode_raw(tf.strings.reduce_join(words.flat_values), tf.uint8)
        word = tf.repeat(tf.range(tf.size(words.flat_values)), tf.strings.length(words.flat_values))
        pieces, word = self._merge(tf.gather(tf.constant(self._bytes, tf.int32), tf.cast(pieces, tf.int32)), word)
        word_ends = tf.searchsorted(word, tf.range(tf.size(words.flat_values) + 1), out_type=tf.int64)
        return tf.RaggedTensor.from_row_splits(pieces, tf.gather(word_ends, text_ends))

    def _merge(self, pieces, word):
        """The pieces `[t]` and the numbers of their words `[t]`, after all merges."""
        pieces, word, _ = tf.while_loop(
            lambda pieces, word, more: more,
            self._turn,
            (pieces, word, tf.constant(True)),
            shape_invariants=(tf.TensorShape([None]), tf.TensorShape([None]), tf.TensorShape([])),
        )
        return pieces, word

    def _turn(self, pieces, word, more):
        pairs = tf.cast(pieces[:-1], tf.int64) * self._size + tf.cast(pieces[1:], tf.int64)
        ranks = tf.where(word[:-1] == word[1:], self._ranks.lookup(pairs), self._unmerged)
        chosen = ranks == tf.gather(tf.math.segment_min(ranks, word[:-1]), word[:-1])
        chosen &= ranks < self._unmerged
        # Of pairs that overlap, as in "aaa", every second one from the left.
        at, run = tf.range(tf.size(ranks)), tf.cumsum(tf.cast(~chosen, tf.int32))
        place = at - tf.gather(tf.math.segment_min(at, run), run) - tf.cast(run > 0, tf.int32)
        chosen &= place % 2 == 0
        merged = tf.gather(tf.constant([*self._merged, 0], tf.int32), ranks)
        left, kept = tf.concat([chosen, [False]], 0), tf.concat([[True], ~chosen], 0)
        kept = kept[: tf.size(pieces)]  # of no pieces too
        pieces = tf.where(left[: tf.size(pieces)], tf.concat([merged, [0]], 0)[: tf.size(pieces)], pieces)
        return tf.boolean_mask(pieces, kept), tf.boolean_mask(word, kept), tf.reduce_any(chosen)

    def _finished(self, spelled):
        opening = " " if self._tokenizer.prefixed else f" ({MASK})"
        return tf.strings.regex_replace(spelled, f"^{opening}", "" if self._tokenizer.prefixed else r"\1")


class WordOperators(GraphTokenizer):
    """A table of words."""

    def __init__(self, tokenizer: WordLevel):
        super().__init__(tokenizer)
        known = {tokenizer.piece(i): i for i in range(tokenizer.file_pieces) if i not in tokenizer.special_ids}
        self._ids = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(list(known), list(known.values()), tf.string, tf.int32),
            tokenizer.unk_id,
        )

    def encode(self, text):
        if self._tokenizer.lines:
            text = tf.strings.regex_replace(text, f"[{SPACES.replace(END_OF_LINE, '')}]+", CUT)
            text = tf.strings.regex_replace(text, END_OF_LINE, f"{CUT}{END_OF_LINE}{CUT}")
        else:
            text = tf.strings.regex_replace(text, f"[{SPACES}]+", CUT)
        words = tf.strings.split(text, CUT)
        words = tf.ragged.boolean_mask(words, words != "")
        return words.with_flat_values(self._ids.lookup(words.flat_values))

    def _finished(self, spelled):
        return tf.strings.regex_replace(tf.strings.regex_replace(spelled, "\n ", "\n"), "^ ", "")
