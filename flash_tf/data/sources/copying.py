"""Copying, and selective copying."""

from collections.abc import Iterator

import numpy as np

from flash_tf.data.generated import NONE, Draws, LabelledWords
from flash_tf.data.sources import SOURCES


@SOURCES.register("copying")
class Copying(LabelledWords):
    """Words among blanks, then as many markers, to be answered by the words in their order.

        selective: . c . . a b . . ? ? ?      not selective: c a b . . . . . ? ? ?
                   - - - - - - - - c a b                     - - - - - - - - c a b

    Copying has the words at the beginning (Arjovsky et al., arXiv:1511.06464), selective copying at random places, so
    that a model must choose by content (Mamba, arXiv:2312.00752, section 4.1.1: 16 words of 16 among 4,096).

    Args:
      length: Words and blanks before the markers.
      tokens: Words to copy.
      vocabulary: Number of words, without blank and marker.
      selective: Whether the words stand at random places.
      train: Examples of the training split.
      validation: Examples of the validation split.
      seed: See `Generated`.
    """

    def __init__(
        self,
        length: int = 256,
        tokens: int = 16,
        vocabulary: int = 16,
        selective: bool = False,
        train: int = 100_000,
        validation: int = 3_000,
        seed: int = 0,
    ):
        super().__init__(train, validation, seed)
        self._need(tokens=tokens, vocabulary=vocabulary)
        if length < tokens:
            raise ValueError(f"copying needs a length of at least its tokens, got {length} and {tokens} tokens")
        self.length, self.tokens, self.vocabulary, self.selective = length, tokens, vocabulary, selective

    @property
    def words(self) -> list[str]:
        return [".", *map(str, range(1, self.vocabulary + 1)), "?"]

    def make(self, draws: Draws, count: int, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        copied = draws.integers(1, self.vocabulary + 1, count, self.tokens)
        words = np.zeros((count, self.length + self.tokens), np.int64)
        places = np.tile(np.arange(self.tokens), (count, 1))
        if self.selective:
            places = np.argsort(draws.uniform(count, self.length), axis=1, kind="stable")[:, : self.tokens]
        np.put_along_axis(words, np.sort(places, axis=1), copied, axis=1)
        words[:, self.length :] = self.vocabulary + 1
        labels = np.full(words.shape, NONE)
        labels[:, self.length :] = copied
        return zip(words, labels, strict=True)
