"""Multi-query associative recall."""

from collections.abc import Iterator

import numpy as np

from flash_tf.data.generated import NONE, Draws, LabelledWords
from flash_tf.data.sources import SOURCES


@SOURCES.register("mqar")
class Mqar(LabelledWords):
    """Pairs of a key and a value, then each key once more, to be answered by its value (Arora et al., Zoology).

        k1 v1 k2 v2 k3 v3  0  0 k2  0 k1  0  0  0 k3  0
         -  -  -  -  -  -  -  - v2  - v1  -  -  - v3  -

    Keys are different words from 1 to `vocabulary / 2 - 1`, values different ones from `vocabulary / 2` on. A key comes
    again at an even distance after the pairs, which a power law draws: near places are likelier. The defaults are the
    paper's, arXiv:2312.04927, Figure 2.

    Args:
      length: Words of an example, even.
      pairs: Pairs, at most a quarter of the length.
      train_pairs: Numbers of pairs that training examples have in turn (default: `pairs`). A later paper mixes easier
        examples into the training so (Arora et al., Based, arXiv:2402.18668).
      vocabulary: Number of words, even.
      power: The exponent of the power law is `power - 1`.
      random_non_queries: Whether the words between queries are random ones and not 0.
      train: Examples of the training split.
      validation: Examples of the validation split.
      seed: See `Generated`.
    """

    def __init__(
        self,
        length: int = 64,
        pairs: int = 4,
        train_pairs: list[int] | None = None,
        vocabulary: int = 8192,
        power: float = 0.01,
        random_non_queries: bool = False,
        train: int = 100_000,
        validation: int = 3_000,
        seed: int = 0,
    ):
        super().__init__(train, validation, seed)
        if train_pairs == []:
            raise ValueError("mqar needs numbers of pairs in train_pairs, got none")
        self._need(pairs=pairs, train_pairs=min(train_pairs or [1]))
        most = max([pairs, *(train_pairs or [])])
        if length % 2 or 4 * most > length:
            raise ValueError(f"mqar needs an even length of at least 4 x pairs, got {length} and {most} pairs")
        if vocabulary % 2 or vocabulary // 2 - 1 < most:
            raise ValueError(f"mqar needs an even vocabulary of more than 2 x pairs, got {vocabulary}, {most} pairs")
        self.length, self.pairs, self.train_pairs, self.vocabulary = length, pairs, train_pairs, vocabulary
        self.power, self.random_non_queries = power, random_non_queries

    @property
    def words(self) -> list[str]:
        return [str(i) for i in range(self.vocabulary)]

    def make(self, draws: Draws, count: int, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        numbers = (split == "train" and self.train_pairs) or [self.pairs]
        of_each = [self._make(draws, -(-(count - i) // len(numbers)), pairs) for i, pairs in enumerate(numbers)]
        for i in range(count):
            yield next(of_each[i % len(numbers)])

    def _make(self, draws, count, pairs):
        half, context = self.vocabulary // 2, 2 * pairs
        keys = draws.distinct(1, half, count, pairs)
        values = draws.distinct(half, self.vocabulary, count, pairs)
        places = context + 2 * self._gaps(draws, count, pairs)
        shape = (count, self.length)
        words = draws.integers(0, self.vocabulary, *shape) if self.random_non_queries else np.zeros(shape, np.int64)
        words[:, 0:context:2], words[:, 1:context:2] = keys, values
        labels = np.full(shape, NONE)
        np.put_along_axis(words, places, keys, axis=1)
        np.put_along_axis(labels, places, values, axis=1)
        return zip(words, labels, strict=True)

    def _gaps(self, draws, count, pairs):
        """Different gaps for each row, drawn one after the other by their weights, int64 `[count, pairs]`."""
        space = self.length // 2 - pairs
        weights = np.arange(1, space + 1) ** (self.power - 1)
        # The first events of processes with these rates come in the order of such draws.
        times = -np.log1p(-draws.uniform(count, space)) / weights
        return np.argsort(times, axis=1, kind="stable")[:, :pairs]
