"""BERT's masking of tokens. The compiled training step draws the masks from the window's number alone."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

NEVER = tf.int32.min  # the score of a token that may not be chosen

SELECT, TREAT, REPLACE = range(3)  # purposes of random numbers; each has its own independent numbers


class MaskedBatch(NamedTuple):
    """A batch to train a masked language model on.

    Attributes:
      inputs: int32 `[b, n]`, the tokens with some replaced.
      positions: int32 `[b, k]`, the positions that the model predicts; k = round(rate · n).
      labels: int32 `[b, k]`, the original tokens at these positions.
      weights: float32 `[b, k]`, 1 at chosen positions, 0 at positions that only fill the array.
    """

    inputs: tf.Tensor
    positions: tf.Tensor
    labels: tf.Tensor
    weights: tf.Tensor


def mask_tokens(
    tokens: tf.Tensor,
    window: tf.Tensor,
    *,
    seed: int,
    rate: float = 0.15,
    special_ids: Sequence[int],
    mask_id: int,
    vocabulary_size: int,
    padding_id: int,
    starts_word: tf.Tensor | None = None,
    segment_ids: tf.Tensor | None = None,
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
        segment_ids = tf.ones_like(tokens)
    maskable = ~tf.reduce_any(tokens[..., None] == tf.constant(special_ids), axis=-1) & (segment_ids != 0)  # [b, n]
    # Python rounds every possible count: float32 on a device rounds some halves the other way.
    budgets = tf.constant([round(rate * count) for count in range(n + 1)])
    budget = tf.gather(budgets, tf.reduce_sum(tf.cast(maskable, tf.int32), axis=1))[:, None]  # [b, 1]
    place = tf.broadcast_to(tf.range(n), tf.shape(tokens))
    word, eligible = place, maskable
    if starts_word is not None:
        word = _words(tf.gather(starts_word, tokens), maskable, segment_ids)
        eligible = maskable & (_word_lengths(word) <= budget)
    scores = tf.where(eligible, tf.bitcast(_random_bits(word, window, seed, SELECT), tf.int32), NEVER)  # [b, n]
    # The hash is one-to-one, so words have different scores, and top_k leaves the tokens of a word together.
    ranked = tf.math.top_k(tf.pad(scores, [[0, 0], [0, 1]], constant_values=NEVER), round(rate * n) + 1)  # [b, k + 1]
    # The first score past the budget. The budget cuts the word with this score, so the whole word is left out.
    bar = tf.gather(ranked.values, budget, axis=1, batch_dims=1)  # [b, 1]
    ordinary = _ordinary(place, window, seed, special_ids, vocabulary_size)
    chance = _unit_interval(place, window, seed, TREAT)
    treated = tf.where(chance < 0.8, mask_id, tf.where(chance < 0.9, ordinary, tokens))
    positions = ranked.indices[:, :-1]
    return MaskedBatch(
        inputs=tf.where(scores > bar, treated, tokens),
        positions=positions,
        labels=tf.gather(tokens, positions, axis=1, batch_dims=1),
        weights=tf.cast(ranked.values[:, :-1] > bar, tf.float32),
    )


def _words(starts: tf.Tensor, maskable: tf.Tensor, segment_ids: tf.Tensor) -> tf.Tensor:
    """For each token the number of its word in the window, int32 `[b, n]`; an unmaskable token is its own word."""
    after_break = ~maskable[:, :-1] | (segment_ids[:, 1:] != segment_ids[:, :-1])
    begins = starts[:, 1:] | ~maskable[:, 1:] | after_break
    return tf.pad(tf.cumsum(tf.cast(begins, tf.int32), axis=1), [[0, 0], [1, 0]])


def _word_lengths(word: tf.Tensor) -> tf.Tensor:
    """For each token the length of its word, int32 `[b, n]`."""
    b, n = tf.shape(word)[0], word.shape[1]
    flat = tf.reshape(word + n * tf.range(b)[:, None], [-1])  # word numbers that are unique in the batch
    return tf.reshape(tf.gather(tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, b * n), flat), [b, n])


def _ordinary(
    counters: tf.Tensor, window: tf.Tensor, seed: int, special_ids: Sequence[int], vocabulary_size: int
) -> tf.Tensor:
    """For each counter a random token that is not special, int32 `[b, n]`."""
    chance = _unit_interval(counters, window, seed, REPLACE)
    drawn = tf.cast(tf.floor(chance * (vocabulary_size - len(special_ids))), tf.int32)
    # The id of ordinary token number i is i plus the number of special ids before it.
    before = tf.constant([special - j for j, special in enumerate(special_ids)])
    return drawn + tf.reduce_sum(tf.cast(before <= drawn[..., None], tf.int32), axis=-1)


def _unit_interval(counters: tf.Tensor, window: tf.Tensor, seed: int, purpose: int) -> tf.Tensor:
    """Uniform in [0, 1), float32 `[b, n]`. It uses the 24 high bits, the most that a float32 holds exactly."""
    bits = tf.bitwise.right_shift(_random_bits(counters, window, seed, purpose), tf.constant(8, tf.uint32))
    return tf.cast(tf.bitcast(bits, tf.int32), tf.float32) * 2.0**-24


def _random_bits(counters: tf.Tensor, window: tf.Tensor, seed: int, purpose: int) -> tf.Tensor:
    """A hash of all arguments, uint32 `[b, n]`. For one window and purpose it is one-to-one in the counter."""
    state = tf.constant(0, tf.uint32)
    for value in (tf.constant([[seed % 2**32]], tf.uint32), tf.constant([[purpose]], tf.uint32)):
        state = _mix(tf.bitwise.bitwise_xor(state, value))
    for value in (window[:, :1], window[:, 1:], counters):
        state = _mix(tf.bitwise.bitwise_xor(state, tf.bitcast(value, tf.uint32)))
    return state


def _mix(bits: tf.Tensor) -> tf.Tensor:
    """A one-to-one map of uint32. Every bit of the argument changes each bit of the result half the time.

    It is the finalizer of MurmurHash3 (A. Appleby), with its shifts and factors.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32)))
        bits *= tf.constant(factor, tf.uint32)
    return tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32)))
