"""ListOps."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from flash_tf.data import list_ops_words
from flash_tf.data.generated import Draws, Generated
from flash_tf.data.list_ops_words import END, OPERATORS
from flash_tf.data.sources import SOURCES

DRAWN = 200_000  # trees for one expression at most: seconds
OPERATES = 0.25  # the probability that a node is an operator
BLOCK = 4096  # numbers drawn at a time


@SOURCES.register("list_ops")
class ListOps(Generated):
    """Nested lists of digits with an operator each, to be answered by their value after the last bracket.

        [MAX 2 9 [MIN 4 7 ] 0 ]
          -  - -  -   - - - - 9

    The operators are minimum, maximum, median (rounded down) and sum modulo 10. The grammar is the Long-Range Arena's
    (Tay et al., arXiv:2011.04006), whose sizes are the defaults: a node above the last level is an operator with
    probability 1/4, and has 2 to `arguments` children. Trees outside of the lengths are drawn again.

    A causal model gets ids and a label after the last one; a classifier of ten classes gets `text` and `label`.

    Args:
      min_length: Words of an expression are more than this.
      max_length: Words of an expression are fewer than this.
      depth: Levels of a tree.
      arguments: The most children of an operator.
      train: Examples of the training split.
      validation: Examples of the validation split.
      seed: See `Generated`.
    """

    words = list_ops_words.WORDS

    def __init__(
        self,
        min_length: int = 500,
        max_length: int = 2000,
        depth: int = 10,
        arguments: int = 10,
        train: int = 96_000,
        validation: int = 2_000,
        seed: int = 0,
    ):
        super().__init__(train, validation, seed)
        if arguments < 2:
            raise ValueError(f"list_ops needs arguments of 2 or more, got {arguments}")
        longest = _longest(depth, arguments)
        if not 0 <= min_length < max_length - 1 or min_length >= longest:
            raise ValueError(
                f"list_ops needs 0 <= min_length < max_length - 1 and expressions longer than min_length, got "
                f"min_length {min_length}, max_length {max_length}, and expressions of up to {longest} words"
            )
        self.min_length, self.max_length, self.depth, self.arguments = min_length, max_length, depth, arguments

    def records(self, draws: Draws, count: int, split: str) -> Iterator[dict[str, Any]]:
        numbers = _numbers(draws)
        for _ in range(count):
            yield list_ops_words.example(*self._expression(numbers))

    def _expression(self, numbers):
        """The words of a tree with a length between the limits, and its value."""
        for _ in range(DRAWN):
            words = []
            value = self._tree(numbers, 1, words)
            if self.min_length < len(words) < self.max_length:
                return words, value
        raise ValueError(
            f"list_ops found no expression of more than {self.min_length} and fewer than {self.max_length} words among "
            f"{DRAWN:,}: set another min_length, max_length, depth or arguments"
        )

    def _tree(self, numbers, level, words):
        """Appends the words of a tree, and returns its value. A tree that has become too long ends early."""
        if level >= self.depth or next(numbers) >= OPERATES or len(words) >= self.max_length:
            value = int(next(numbers) * 10)
            words.append(str(value))
            return value
        count = 2 + int(next(numbers) * (self.arguments - 1))
        operator = OPERATORS[int(next(numbers) * len(OPERATORS))]
        words.append(operator)
        values = [self._tree(numbers, level + 1, words) for _ in range(count)]
        words.append(END)
        return _value(operator, values)


def _value(operator, values):
    if operator == "[MED":
        return int(np.median(values))
    return {"[MIN": min, "[MAX": max, "[SM": lambda found: sum(found) % 10}[operator](values)


def _numbers(draws):
    while True:
        yield from draws.uniform(BLOCK).tolist()


def _longest(depth, arguments):
    """Words of the longest expression."""
    length = 1
    for _ in range(depth - 1):
        length = 2 + arguments * length
    return length
