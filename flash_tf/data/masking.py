"""BERT's masking of tokens. The compiled training step draws the masks from the window's number alone."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from keras import ops

from kernels_xla.common.spec import Tensor

NEVER = -(2**31)  # the score of a token that may not be chosen

SELECT, TREAT, REPLACE = range(3)  # purposes of random numbers; each has its own independent numbers


class MaskedBatch(NamedTuple):
    """A batch to train a masked language model on.

    Attributes:
      inputs: int32 `[b, n]`, the tokens with some replaced.
      positions: int32 `[b, k]`, the positions that the model predicts; k = round(rate · n).
      labels: int32 `[b, k]`, the original tokens at these positions.
      weights: float32 `[b, k]`, 1 at chosen positions, 0 at positions that only fill the array.
    """

    inputs: Tensor
    positions: Tensor
    labels: Tensor
    weights: Tensor


def mask_tokens(
    tokens: Tensor,
    window: Tensor,
    *,
    seed: int,
    rate: float = 0.15,
    special_ids: Sequence[int],
    mask_id: int,
    vocabulary_size: int,
    padding_id: int,
    starts_word: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> MaskedBatch:
    """Chooses round(rate · maskable) tokens of each window; 80 % become the mask, 10 % another token, 10 % stay.

    Every token except special ones and padding is maskable. The masks of a window depend on `seed` and its entry in
    `window` alone: they are the same in every batch, on every replica, and after a restart.

    With `starts_word` whole words are chosen, in random order until the next would exceed the number. So a little
    fewer tokens are chosen. A word that exceeds the number by itself is never chosen: it would end the choice at once.

    Args:
      tokens: int32 `[b, n]`, n static.
      window: int32 `[b, 2]`, the epoch and the window's number in it.
      seed: The seed; its low 32 bits count.
      rate: Share of the maskable tokens to choose, between 0 and 1.
      special_ids: Tokens that are neither masked nor drawn as replacements. The mask and padding always belong to them.
      mask_id: The mask's id.
      vocabulary_size: V.
      padding_id: The padding's id.
      starts_word: bool `[V]`, the tokens that begin a word; None to choose single tokens. A word ends before the next
        beginning, special token or document.
      segment_ids: int32 `[b, n]`, the packed documents; 0 is padding. None for one document in each window.

    Raises:
      ValueError: The rate or the vocabulary leaves nothing to choose.
    """
    n = tokens.shape[1]
    special_ids = sorted(i for i in {*special_ids, mask_id, padding_id} if i < vocabulary_size)
    if not 0 < rate < 1 or round(rate * n) < 1:
        raise ValueError(f"masking needs a rate below 1 that chooses a token or more of {n}, got {rate}")
    if vocabulary_size <= len(special_ids):
        raise ValueError(f"masking needs ordinary tokens, got {vocabulary_size} tokens, {len(special_ids)} special")
    if segment_ids is None:
        segment_ids = ops.ones_like(tokens)
    special = ops.convert_to_tensor(special_ids, "int32")
    maskable = ~ops.any(tokens[..., None] == special, axis=-1) & (segment_ids != 0)  # [b, n]
    # Python rounds every possible count: float32 on a device rounds some halves the other way.
    budgets = ops.convert_to_tensor([round(rate * count) for count in range(n + 1)], "int32")
    budget = ops.take(budgets, ops.sum(ops.cast(maskable, "int32"), axis=1), axis=0)[:, None]  # [b, 1]
    place = ops.broadcast_to(ops.arange(n, dtype="int32"), ops.shape(tokens))
    word, eligible = place, maskable
    if starts_word is not None:
        word = _words(ops.take(starts_word, tokens, axis=0), maskable, segment_ids)
        eligible = maskable & (_word_lengths(word) <= budget)
    scores = ops.where(eligible, ops.view(_random_bits(word, window, seed, SELECT), "int32"), NEVER)  # [b, n]
    # The hash is one-to-one, so words have different scores, and top_k leaves the tokens of a word together.
    ranked, indices = ops.top_k(ops.pad(scores, [[0, 0], [0, 1]], constant_values=NEVER), round(rate * n) + 1)
    # The first score past the budget. The budget cuts the word with this score, so the whole word is left out.
    bar = ops.take_along_axis(ranked, budget, axis=1)  # [b, 1]
    ordinary = _ordinary(place, window, seed, special_ids, vocabulary_size)
    chance = _unit_interval(place, window, seed, TREAT)
    treated = ops.where(chance < 0.8, mask_id, ops.where(chance < 0.9, ordinary, tokens))
    positions = indices[:, :-1]
    return MaskedBatch(
        inputs=ops.where(scores > bar, treated, tokens),
        positions=positions,
        labels=ops.take_along_axis(tokens, positions, axis=1),
        weights=ops.cast(ranked[:, :-1] > bar, "float32"),
    )


def _words(starts: Tensor, maskable: Tensor, segment_ids: Tensor) -> Tensor:
    """For each token the number of its word in the window, int32 `[b, n]`; an unmaskable token is its own word."""
    after_break = ~maskable[:, :-1] | (segment_ids[:, 1:] != segment_ids[:, :-1])
    begins = starts[:, 1:] | ~maskable[:, 1:] | after_break
    return ops.pad(ops.cumsum(ops.cast(begins, "int32"), axis=1), [[0, 0], [1, 0]])


def _word_lengths(word: Tensor) -> Tensor:
    """For each token the length of its word, int32 `[b, n]`."""
    b, n = ops.shape(word)[0], word.shape[1]
    flat = ops.reshape(word + n * ops.arange(b, dtype="int32")[:, None], (-1,))  # numbers that are unique in the batch
    return ops.reshape(ops.take(ops.segment_sum(ops.ones_like(flat), flat, b * n), flat, axis=0), (b, n))


def _ordinary(counters: Tensor, window: Tensor, seed: int, special_ids: Sequence[int], vocabulary_size: int) -> Tensor:
    """For each counter a random token that is not special, int32 `[b, n]`."""
    chance = _unit_interval(counters, window, seed, REPLACE)
    drawn = ops.cast(ops.floor(chance * (vocabulary_size - len(special_ids))), "int32")
    # The id of ordinary token number i is i plus the number of special ids before it.
    before = ops.convert_to_tensor([special - j for j, special in enumerate(special_ids)], "int32")
    return drawn + ops.sum(ops.cast(before <= drawn[..., None], "int32"), axis=-1)


def _unit_interval(counters: Tensor, window: Tensor, seed: int, purpose: int) -> Tensor:
    """Uniform in [0, 1), float32 `[b, n]`. It uses the 24 high bits, the most that a float32 holds exactly."""
    bits = ops.right_shift(_random_bits(counters, window, seed, purpose), _uint32(8))
    return ops.cast(ops.view(bits, "int32"), "float32") * 2.0**-24


def _random_bits(counters: Tensor, window: Tensor, seed: int, purpose: int) -> Tensor:
    """A hash of all arguments, uint32 `[b, n]`. For one window and purpose it is one-to-one in the counter."""
    state = _uint32(0)
    for value in (_uint32([[seed % 2**32]]), _uint32([[purpose]])):
        state = _mix(ops.bitwise_xor(state, value))
    for value in (window[:, :1], window[:, 1:], counters):
        state = _mix(ops.bitwise_xor(state, ops.view(value, "uint32")))
    return state


def _mix(bits: Tensor) -> Tensor:
    """A one-to-one map of uint32. Every bit of the argument changes each bit of the result half the time.

    It is the finalizer of MurmurHash3 (A. Appleby), with its shifts and factors.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = ops.bitwise_xor(bits, ops.right_shift(bits, _uint32(shift)))
        bits *= _uint32(factor)
    return ops.bitwise_xor(bits, ops.right_shift(bits, _uint32(16)))


def _uint32(value: int | list) -> Tensor:
    return ops.convert_to_tensor(np.asarray(value, np.uint32))
