"""What a model is asked: token windows in, negative log-likelihoods of the right tokens out."""

from typing import NamedTuple

import keras
import tensorflow as tf

from flash_tf.config import Config
from flash_tf.data.masking import mask_tokens
from flash_tf.data.tokenizer import Tokenizer


class Prediction(NamedTuple):
    """Likelihoods at the positions that are asked.

    Attributes:
      nll: float32 `[b, k]`, negative natural logarithm of the label's probability.
      labels: int32 `[b, k]`.
      weights: float32 `[b, k]`, 1 where a position counts, else 0.
    """

    nll: tf.Tensor
    labels: tf.Tensor
    weights: tf.Tensor


class CausalObjective:
    """Predict each token from those before it: windows of n + 1 tokens, n predictions."""

    overlap = 1

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._pad = tokenizer.pad_id

    def __call__(self, model: keras.Model, batch: dict[str, tf.Tensor], training: bool) -> Prediction:
        tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        counts, segments = labels != self._pad, None
        if "segment_ids" in batch:
            segments, following = batch["segment_ids"][:, :-1], batch["segment_ids"][:, 1:]
            counts = (following == segments) & (following > 0)
        logits = model(tokens, segment_ids=segments, training=training)
        return Prediction(_nll(logits, labels), labels, tf.cast(counts, tf.float32))


class MaskedObjective:
    """Predict masked tokens from all others. Masks follow from the seed, the epoch and the window alone."""

    overlap = 0

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._pad = tokenizer.pad_id
        self._options = {
            "seed": config.train.seed,
            "rate": config.masking.rate,
            "special_ids": tokenizer.special_ids,
            "mask_id": tokenizer.mask_id,
            "vocabulary_size": tokenizer.vocabulary_size,
            "padding_id": tokenizer.pad_id,
        }
        self._starts_word = tokenizer.starts_word if config.masking.whole_words else None

    def __call__(self, model: keras.Model, batch: dict[str, tf.Tensor], training: bool) -> Prediction:
        segments = batch.get("segment_ids")
        starts = None if self._starts_word is None else tf.constant(self._starts_word)
        masked = mask_tokens(
            batch["tokens"], batch["window"], segment_ids=segments, starts_word=starts, **self._options
        )
        # Concatenated training windows are full; only the last one of an evaluation has padding.
        padding = None if training or segments is not None else batch["tokens"] != self._pad
        logits = model(
            masked.inputs,
            masked_positions=masked.positions,
            padding_mask=padding,
            segment_ids=segments,
            training=training,
        )
        return Prediction(_nll(logits, masked.labels), masked.labels, masked.weights)


OBJECTIVES = {"causal_lm": CausalObjective, "masked_lm": MaskedObjective}  # of each model type


def _nll(logits, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
