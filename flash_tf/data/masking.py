"""BERT's masking of tokens, drawn inside the compiled train step from the number of the window and nothing else."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

NEVER = tf.int32.min  # the score of what may not be chosen

SELECT, TREAT, REPLACE = range(3)  # what a random number is for; equal counters give independent numbers for each


class MaskedBatch(NamedTuple):
    """What a masked language model is trained on.

    Attributes:
      inputs: int32 `[b, n]`, the tokens with some replaced.
      positions: int32 `[b, k]`, where the model is asked; k = round(rate · n).
      labels: int32 `[b, k]`, the original tokens there.
      weights: float32 `[b, k]`, 1 where the position was chosen, 0 where it only fills the row.
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
    """Chooses round(rate · maskable) tokens of each row; 80 % become the mask, 10 % another token, 10 % stay.

    Every token but special ones and padding is maskable. The masks of a row follow from `seed` and its line of
    `window` alone: they are the same in every batch, on every replica, and after a restart.

    With `starts_word` words are chosen whole, in random order until the next would exceed the number, so a little
    fewer tokens are chosen. Words that alone exceed the number are never chosen: they would end a row's choice before
    it began.

    Args:
      tokens: int32 `[b, n]`, n static.
      window: int32 `[b, 2]`, the epoch and the window's number in it.
      seed: Its low 32 bits count.
      rate: Between 0 and 1.
      special_ids: Tokens that are neither masked nor drawn as replacements; the mask and padding are always among
        them.
      mask_id: The mask.
      vocabulary_size: V.
      padding_id: The padding.
      starts_word: bool `[V]`, the tokens that begin a word; None to choose single tokens. A word goes on to the next
        beginning, special token or document.
      segment_ids: int32 `[b, n]`, the packed documents; 0 is padding. None for one document a row.

    Raises:
      ValueError: When the rate or the vocabulary leaves nothing to choose.
    """
    n = tokens.shape[1]
    special_ids = sorted(i for i in {*special_ids, mask_id, padding_id} if i < vocabulary_size)
    if not 0 < rate < 1 or round(rate * n) < 1:
        raise ValueError(f"masking needs a rate below 1 that chooses a token or more of {n}, got {rate}")
    if vocabulary_size <= len(special_ids):
        raise ValueError(f"masking needs ordinary tokens, got {vocabulary_size} of which {len(special_ids)} special")
    if segment_ids is None:
        segment_ids = tf.ones_like(tokens)
    maskable = ~tf.reduce_any(tokens[..., None] == tf.constant(special_ids), axis=-1) & (segment_ids != 0)  # [b, n]
    # Rounded by Python for every possible count: float32 on a device rounds some halves the other way.
    budgets = tf.constant([round(rate * count) for count in range(n + 1)])
    budget = tf.gather(budgets, tf.reduce_sum(tf.cast(maskable, tf.int32), axis=1))[:, None]  # [b, 1]
    place = tf.broadcast_to(tf.range(n), tf.shape(tokens))
    word, eligible = place, maskable
    if starts_word is not None:
        word = _words(tf.gather(starts_word, tokens), maskable, segment_ids)
        eligible = maskable & (_word_lengths(word) <= budget)
    scores = tf.where(eligible, tf.bitcast(_random_bits(word, window, seed, SELECT), tf.int32), NEVER)  # [b, n]
    # The hash is one-to-one, so words differ in score, and top_k keeps the tokens of one word together.
    ranked = tf.math.top_k(tf.pad(scores, [[0, 0], [0, 1]], constant_values=NEVER), round(rate * n) + 1)  # [b, k + 1]
    # The first score past the budget: a word with that score is cut by the budget, and left out whole.
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
    """The number in its row of the word that each token belongs to, int32 `[b, n]`; unmaskable tokens stand alone."""
    after_break = ~maskable[:, :-1] | (segment_ids[:, 1:] != segment_ids[:, :-1])
    begins = starts[:, 1:] | ~maskable[:, 1:] | after_break
    return tf.pad(tf.cumsum(tf.cast(begins, tf.int32), axis=1), [[0, 0], [1, 0]])


def _word_lengths(word: tf.Tensor) -> tf.Tensor:
    """The length of the word that each token belongs to, int32 `[b, n]`."""
    b, n = tf.shape(word)[0], word.shape[1]
    flat = tf.reshape(word + n * tf.range(b)[:, None], [-1])  # numbered through the batch
    return tf.reshape(tf.gather(tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, b * n), flat), [b, n])


def _ordinary(
    counters: tf.Tensor, window: tf.Tensor, seed: int, special_ids: Sequence[int], vocabulary_size: int
) -> tf.Tensor:
    """A random token that is not special for each counter, int32 `[b, n]`."""
    chance = _unit_interval(counters, window, seed, REPLACE)
    drawn = tf.cast(tf.floor(chance * (vocabulary_size - len(special_ids))), tf.int32)
    # The ordinary token number i is i plus the number of special ids that come before it.
    before = tf.constant([special - j for j, special in enumerate(special_ids)])
    return drawn + tf.reduce_sum(tf.cast(before <= drawn[..., None], tf.int32), axis=-1)


def _unit_interval(counters: tf.Tensor, window: tf.Tensor, seed: int, purpose: int) -> tf.Tensor:
    """Uniform in [0, 1), float32 `[b, n]`: the 24 high bits, all that a float32 holds exactly."""
    bits = tf.bitwise.right_shift(_random_bits(counters, window, seed, purpose), tf.constant(8, tf.uint32))
    return tf.cast(tf.bitcast(bits, tf.int32), tf.float32) * 2.0**-24


def _random_bits(counters: tf.Tensor, window: tf.Tensor, seed: int, purpose: int) -> tf.Tensor:
    """A hash of all arguments, uint32 `[b, n]`; for a row and a purpose it is one-to-one in the counter."""
    state = tf.constant(0, tf.uint32)
    for part in (tf.constant([[seed % 2**32]], tf.uint32), tf.constant([[purpose]], tf.uint32)):
        state = _mix(tf.bitwise.bitwise_xor(state, part))
    for part in (window[:, :1], window[:, 1:], counters):
        state = _mix(tf.bitwise.bitwise_xor(state, tf.bitcast(part, tf.uint32)))
    return state


def _mix(bits: tf.Tensor) -> tf.Tensor:
    """A one-to-one map of uint32 in which every bit of the argument changes each bit of the result half the time.

    Shifts and factors are those of MurmurHash3's finalizer (A. Appleby).
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint32)))
        bits *= tf.constant(factor, tf.uint32)
    return tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32)))
