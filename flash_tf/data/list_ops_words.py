"""The words of ListOps, and an expression as an example."""

import numpy as np

from flash_tf.data.generated import FIRST, NONE

OPERATORS = ["[MIN", "[MAX", "[MED", "[SM"]
END = "]"
WORDS = [*OPERATORS, END, *map(str, range(10))]
INDEX = {word: i for i, word in enumerate(WORDS)}


def example(words: list[str], value: int) -> dict:
    """An expression for every task.

    Returns:
      `token_ids` and `labels`, int64 `[length]`, of a causal model: the value after the last word. `text` and `label`
      of a classifier.
    """
    labels = np.full(len(words), NONE)
    labels[-1] = INDEX[str(value)] + FIRST
    ids = np.array([INDEX[word] + FIRST for word in words])
    return {"token_ids": ids, "labels": labels, "text": " ".join(words), "label": value}
