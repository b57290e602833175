"""The ids of many texts at once, the same as `Tokenizer.encode` gives."""

from itertools import chain

import numpy as np
import tensorflow_text

from flash_tf.data.tokenizer import Tokenizer, whole
from flash_tf.data.tokenizers.sentence_piece import CHUNK, SentencePiece


class Encoder:
    """Encodes lists of texts.

    Most SentencePiece models have a faster operator in TF-Text. Python cuts the texts into its chunks: `tf.strings`
    takes thirty times as long for it as the operator for the ids.

    Args:
      tokenizer: Of any kind.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._operator = tokenizer, None
        if isinstance(tokenizer, SentencePiece) and tokenizer.fast and tokenizer.spaced:
            self._operator = tensorflow_text.FastSentencepieceTokenizer(tokenizer.graph_model)
            self._from_text = np.arange(tokenizer.vocabulary_size, dtype=np.int32)
            self._from_text[list(tokenizer.special_ids)] = tokenizer.unk_id

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts one after the other, int32 `[t]`, and the number of each text's, int64 `[texts]`."""
        # The operator keeps the character "▁" at a text's end, which SentencePiece takes for a blank.
        if self._operator is None or any("▁" in text for text in texts):
            found = self._tokenizer.encode(texts)
            return np.concatenate([np.zeros(0, np.int32), *found]), np.array([len(ids) for ids in found], np.int64)
        chunks = [CHUNK.findall(whole(text)) for text in texts]
        ids = self._operator.tokenize([chunk.encode() for chunk in chain.from_iterable(chunks)] or [""])
        ends = ids.row_splits.numpy()[np.cumsum([0, *map(len, chunks)])]
        return self._from_text[ids.flat_values.numpy()], np.diff(ends)
