"""Induction heads."""

from collections.abc import Iterator

import numpy as np

from flash_tf.data.generated import NONE, Draws, LabelledWords
from flash_tf.data.sources import SOURCES


@SOURCES.register("induction")
class Induction(LabelledWords):
    """Random words, and a marker at a random place and again at the end: what followed it the first time?

        c a d ! b a c d b !
        - - - - - - - - - b

    As in Mamba, arXiv:2312.00752, section 4.1.2, whose sizes are the defaults.

    Args:
      length: Words of an example, with both markers.
      vocabulary: Number of words, without the marker.
      train: Examples of the training split.
      validation: Examples of the validation split.
      seed: See `Generated`.
    """

    def __init__(
        self,
        length: int = 256,
        vocabulary: int = 16,
        train: int = 100_000,
        validation: int = 3_000,
        seed: int = 0,
    ):
        super().__init__(train, validation, seed)
        self._need(vocabulary=vocabulary)
        if length < 3:
            raise ValueError(f"induction needs a length of 3 or more, got {length}")
        self.length, self.vocabulary = length, vocabulary

    @property
    def words(self) -> list[str]:
        return [*map(str, range(self.vocabulary)), "!"]

    def make(self, draws: Draws, count: int, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        words, rows = draws.integers(0, self.vocabulary, count, self.length), np.arange(count)
        place = draws.integers(0, self.length - 2, count)
        words[rows, place] = words[:, -1] = self.vocabulary
        labels = np.full(words.shape, NONE)
        labels[:, -1] = words[rows, place + 1]
        return zip(words, labels, strict=True)
