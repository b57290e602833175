"""An order of numbers that a key decides, and in which any place is found at once.

Whole numbers of Python, arrays of NumPy and tensors of TensorFlow or JAX go through the same arithmetic, so all of them
give the same order. Integers must have 64 bits; no product is larger.
"""

from typing import Any

import numpy as np

WORD = 2**32
ROUNDS = 6
GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: the rounds' keys lie far apart


def mixed(x: Any) -> Any:
    """A number below 2^32 as another one, all of whose bits depend on all bits of the first.

    Source: Chris Wellons, hash-prospector: multiply and xorshift, twice with 0x45d9f3b.
    """
    for _ in range(2):
        x = (x ^ (x // 2**16)) * 0x45D9F3B % WORD
    return x ^ (x // 2**16)


def key_of(seed: Any, *purpose: Any) -> Any:
    """A key below 2^32 from a seed and further numbers, all from 0 to 2^32 - 1."""
    key = mixed(seed)
    for number in purpose:
        key = mixed(key ^ number)
    return key


def base_of(count: int) -> int:
    """The least power of two whose square is at least `count`."""
    return 2 ** -(-max(1, count - 1).bit_length() // 2)


def turned(x: Any, base: Any, key: Any) -> Any:
    """A number below base^2 as another one, one to one: a Feistel network."""
    left, right = x // base, x % base
    for number in range(ROUNDS):
        left, right = right, left ^ (mixed(right ^ ((key + number * GOLDEN) % WORD)) % base)
    return left * base + right


def shuffled(places: np.ndarray, count: int, key: int) -> np.ndarray:
    """The numbers at some places of the order of the numbers below `count`, int64 of the same shape.

    A number that is too large is turned again until it is below `count`, less than three times on average.
    """
    base, numbers = base_of(count), np.asarray(places, np.int64)
    numbers = turned(numbers, base, key)
    while (outside := numbers >= count).any():
        numbers = np.where(outside, turned(numbers, base, key), numbers)
    return numbers
