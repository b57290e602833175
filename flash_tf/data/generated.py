"""Labelled examples that a generator makes: rows of token ids with a label at some of them."""

import abc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

SHARD_EXAMPLES = 4096
SPLITS = ("train", "validation")
FIRST = 5  # the id of a source's first word: before it stand pad, eos, unknown, mask and cls
NONE = -1  # no label


class Draws:
    """Random numbers that some integers decide, the same with every version of NumPy.

    NumPy guarantees the raw stream of a bit generator, and not what `Generator` makes of it.
    """

    def __init__(self, *seed: int):
        self._bits = np.random.PCG64(np.random.SeedSequence(seed))

    def uniform(self, *shape: int) -> np.ndarray:
        """Numbers in [0, 1), float64."""
        return (self._bits.random_raw(math.prod(shape)) >> 11).reshape(shape) * 2.0**-53

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Integers from `low` to `high - 1`."""
        return low + (self.uniform(*shape) * (high - low)).astype(np.int64)

    def distinct(self, low: int, high: int, rows: int, count: int) -> np.ndarray:
        """Rows of `count` different integers from `low` to `high - 1`, in any order, int64 `[rows, count]`."""
        found = np.full((rows, count), low - 1)
        for column in range(count):
            again = np.arange(rows)
            while len(again):
                drawn = self.integers(low, high, len(again))
                found[again, column] = drawn
                again = again[(found[again, :column] == drawn[:, None]).any(axis=1)]
        return found


class Generated(abc.ABC):
    """A source of made-up examples. The splits draw from streams of their own.

    A subclass defines `words` and `records`.

    Args:
      train: Examples of the training split.
      validation: Examples of the validation split.
      seed: Decides the examples, beside the other options.

    Attributes:
      words: The words of the task; the first one has the id `FIRST`.
    """

    labelled = True
    counts_words = False
    words: list[str]

    def __init__(self, train: int, validation: int, seed: int):
        self.train, self.validation, self.seed = train, validation, seed
        self._need(train=train, validation=validation)
        if seed < 0:
            raise ValueError(f"{self.name} needs a seed of 0 or more, got {seed}")

    @property
    def name(self) -> str:
        """The source's name in YAML, for messages."""
        return type(self).__module__.rpartition(".")[2]

    @abc.abstractmethod
    def records(self, draws: Draws, count: int, split: str) -> Iterator[dict[str, Any]]:
        """Some examples of a split, with a task's own keys."""

    def shards(self, split: str) -> list[str]:
        """Names of the shards, each with up to `SHARD_EXAMPLES` examples."""
        count = -(-getattr(self, split) // SHARD_EXAMPLES)
        return [f"{split}-{i:05d}-of-{count:05d}" for i in range(count)]

    def examples(self, split: str, shard: str) -> Iterator[dict[str, Any]]:
        """The examples of a shard."""
        index = self.shards(split).index(shard)
        count = min(SHARD_EXAMPLES, getattr(self, split) - index * SHARD_EXAMPLES)
        yield from self.records(Draws(self.seed, SPLITS.index(split), index), count, split)

    def identity(self) -> dict:
        """The source's name and options."""
        return {"generator": self.name, **vars(self)}

    def _need(self, **options):
        for name, value in options.items():
            if value < 1:
                raise ValueError(f"{self.name} needs {name} of 1 or more, got {value}")


class LabelledWords(Generated):
    """A source of texts whose words have labels. A subclass defines `words` and `make`."""

    @abc.abstractmethod
    def make(self, draws: Draws, count: int, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Some examples of a split: for each the indices of its words, and the index of each word's label or `NONE`.

        A label is what to predict after reading the word and all words before it.
        """

    def records(self, draws: Draws, count: int, split: str) -> Iterator[dict[str, Any]]:
        """Some examples as `token_ids` and `labels`, int64 `[length]`."""
        for words, labels in self.make(draws, count, split):
            yield {"token_ids": words + FIRST, "labels": np.where(labels == NONE, NONE, labels + FIRST)}
