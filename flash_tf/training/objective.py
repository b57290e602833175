"""Training objectives: from token windows to the negative log-likelihoods of their labels."""

from typing import TYPE_CHECKING, NamedTuple

import keras
from keras import ops

from flash_tf.config import Config
from flash_tf.data.masking import mask_tokens
from flash_tf.layers.fused import takes_fused
from kernels_pallas import cross_entropy as fused
from kernels_xla.common.cross_entropy import cross_entropy, of_block, tokens_of_block
from kernels_xla.common.sharding import by_device
from kernels_xla.common.spec import Tensor

if TYPE_CHECKING:
    from flash_tf.data.tokenizer import Tokenizer


class Prediction(NamedTuple):
    """Likelihoods at the predicted positions.

    Attributes:
      nll: float32 `[b, k]`, the negative natural logarithm of the label's probability.
      labels: int32 `[b, k]`, the right tokens.
      weights: float32 `[b, k]`, 1 if a position counts, else 0.
    """

    nll: Tensor
    labels: Tensor
    weights: Tensor


class Examples(NamedTuple):
    """The inputs and labels that an objective makes of a batch.

    Attributes:
      tokens: int32 `[b, n]`.
      options: The model's other call arguments.
      labels: int32 `[b, k]`, the right tokens.
      weights: float32 `[b, k]`, 1 if a position counts, else 0.
    """

    tokens: Tensor
    options: dict[str, Tensor]
    labels: Tensor
    weights: Tensor


class Objective:
    """Turns windows into examples, and a model's predictions into likelihoods.

    A subclass defines `examples` and `overlap`.

    Attributes:
      overlap: Tokens of a window beyond the sequence length.
      METRICS: What `evaluation.metric` may name beside the loss.
    """

    overlap: int
    METRICS = ()

    def __init__(self, config: Config, tokenizer: "Tokenizer"):
        self.config, self._pad = config, tokenizer.pad_id

    @staticmethod
    def encoder_of(config: Config, tokenizer: "Tokenizer | None") -> None:
        """None: a language model reads documents, and no rows; see `TaskObjective.encoder_of`."""

    def examples(self, batch: dict[str, Tensor], training: bool) -> Examples:
        """The examples of a batch."""
        raise NotImplementedError

    def __call__(self, model: keras.Model, batch: dict[str, Tensor], training: bool = False) -> Prediction:
        """The likelihood at each predicted position."""
        tokens, options, labels, weights = self.examples(batch, training)
        logits = ops.cast(model(tokens, **options, training=training), "float32")
        return Prediction(ops.sparse_categorical_crossentropy(labels, logits, from_logits=True), labels, weights)

    def loss(self, model: keras.Model, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed negative log-likelihood and the number of predicted tokens, float32, for training.

        The numbers are the same as in `__call__`, but computed in blocks of tokens: all logits at once would not fit
        beside the activations.
        """
        tokens, options, labels, weights = self.examples(batch, training=True)
        x = model.encode(tokens, **options, training=True)
        (x, devices), (labels, _), (weights, _) = map(by_device, (x, labels, weights))
        table, each = model.head_weights, tokens_of_block(x.shape[0], devices=devices)
        one = fused.of_block if has_fused_loss(self.config, each, table.shape[0], x.dtype) else of_block
        loss = cross_entropy(x, table, model.output_bias, labels, weights, devices=devices, of_block=one)
        return loss, ops.sum(weights)


def has_fused_loss(config: Config, tokens: int, vocabulary: int, dtype) -> bool:
    """Whether fused kernels compute the loss of blocks of so many tokens; a ValueError if they must and cannot."""
    sizes = lambda: fused.sizes(tokens, vocabulary, dtype)  # noqa: E731
    return takes_fused("train.loss_implementation", config.train.loss_implementation, fused, sizes)


class CausalObjective(Objective):
    """Predicts each token from the tokens before it: windows of n + 1 tokens, n predictions."""

    overlap = 1

    def examples(self, batch, training):
        tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        counts, segments = labels != self._pad, None
        if "segment_ids" in batch:
            segments, following = batch["segment_ids"][:, :-1], batch["segment_ids"][:, 1:]
            counts = (following == segments) & (following > 0)
        return Examples(tokens, {"segment_ids": segments}, labels, ops.cast(counts, "float32"))


class MaskedObjective(Objective):
    """Predicts masked tokens from the others. The masks depend on the seed, the epoch and the window alone."""

    overlap = 0

    def __init__(self, config: Config, tokenizer: "Tokenizer"):
        super().__init__(config, tokenizer)
        self._options = {
            "seed": config.train.seed,
            "rate": config.masking.rate,
            "special_ids": tokenizer.special_ids,
            "mask_id": tokenizer.mask_id,
            "vocabulary_size": tokenizer.vocabulary_size,
            "padding_id": tokenizer.pad_id,
        }
        self._starts_word = tokenizer.starts_word if config.masking.whole_words else None

    def examples(self, batch, training):
        segments = batch.get("segment_ids")
        starts = None if self._starts_word is None else ops.convert_to_tensor(self._starts_word)
        masked = mask_tokens(
            batch["tokens"], batch["window"], segment_ids=segments, starts_word=starts, **self._options
        )
        # Concatenated training windows are full. Only the last window of an evaluation has padding.
        padding = None if training or segments is not None else batch["tokens"] != self._pad
        options = {"masked_positions": masked.positions, "padding_mask": padding, "segment_ids": segments}
        return Examples(masked.inputs, options, masked.labels, masked.weights)


OBJECTIVES = {"causal_lm": CausalObjective, "masked_lm": MaskedObjective}  # of each model type
