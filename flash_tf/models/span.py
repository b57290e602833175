"""Question answering: the first and the last token of an answer in a text."""

import math

import keras
from keras import ops

from flash_tf.layers.common import normal, own_policies
from flash_tf.models.language_model import MODELS, LanguageModel, unpack
from flash_tf.registry import takes_options_of
from kernels_xla.common.spec import Tensor


@MODELS.register("span")
@takes_options_of(LanguageModel, without=("head_bias", "tie_embeddings"))
@keras.saving.register_keras_serializable("flash_tf")
class SpanExtractor(LanguageModel):
    """Token ids `[b, n]` -> logits `[b, n, 2]`: of the first and of the last token of an answer, as in BERT.

    Train it with `flash-tf train`. A row has a question and a part of a text. The token at position 0 stands for a part
    without the answer.

    Args:
      no_answer: Whether a question may have no answer. If not, `evaluate` and `predict` always take the best span.
      no_answer_threshold: The sum of the best span's two logits, less the same sum at position 0, below which a
        question has no answer. It is minus BERT's `null_score_diff_threshold`.
      **kwargs: As for `LanguageModel`, except `head_bias` and `tie_embeddings`, which belong to a head over tokens.

    Call arguments:
      token_ids: Integers `[b, n]`, or a dictionary of all call arguments, as `fit` passes it.
      padding_mask: Bool `[b, n]`, True at real tokens.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Logits `[b, n, 2]`, in the compute dtype.

    Example:
      >>> import numpy as np
      >>> model = SpanExtractor(vocabulary_size=256, width=16, depth=2, mixer={"type": "gau", "key_dim": 8})
      >>> model(np.zeros((3, 50), "int32")).shape
      TensorShape([3, 50, 2])
    """

    causal = False
    predicts_tokens = False
    HEAD = ("span", "transform")

    def __init__(self, no_answer: bool = True, no_answer_threshold: float = 0.0, **kwargs):
        super().__init__(**kwargs, head_bias=False)
        if not math.isfinite(no_answer_threshold) or (no_answer_threshold and not no_answer):
            needed = "a finite number" if no_answer else "0 with no_answer: false"
            raise ValueError(f"no_answer_threshold must be {needed}, got {no_answer_threshold}")
        self.no_answer, self.no_answer_threshold = no_answer, no_answer_threshold
        self.span = keras.layers.Dense(2, kernel_initializer=normal(), dtype=self.dtype_policy, name="span")

    def build(self, input_shape: tuple | None = None) -> None:
        super().build(input_shape)
        self.span.build((None, None, self.width))
        own_policies(self)

    def call(
        self,
        token_ids: Tensor,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        given = unpack(token_ids, {"padding_mask": padding_mask, "positions": positions}, mask)
        return self.span(self.encode(**given, training=training))

    def compute_output_spec(self, token_ids: Tensor, *arguments, **options) -> keras.KerasTensor:
        del arguments, options
        return keras.KerasTensor((*unpack(token_ids, {})["token_ids"].shape, 2), self.compute_dtype)

    def flops(self, n: int, predicted: int = 0) -> int:
        """Forward FLOPs over one row of n tokens, multiply-adds as two."""
        del predicted
        return super().flops(n, 0) + 2 * n * self.width * 2

    def activation_bytes(self, n: int, predicted: int, itemsize: int) -> int:
        """As for `LanguageModel`, without a head over the vocabulary."""
        del predicted
        return super().activation_bytes(n, 0, itemsize)

    def decode_state_bytes(self, n: int, itemsize: int = 2) -> None:
        """None: it does not decode."""


def best_spans(logits: Tensor, words: Tensor, longest: int) -> Tensor:
    """The best span of each row.

    Args:
      logits: `[b, n, 2]` of `SpanExtractor`, float32.
      words: Integers `[b, n]`, the number of each token's word in the text; below 0 for tokens outside the text.
      longest: The most tokens of a span.

    Returns:
      Float32 `[b, 4]`: the sum of the span's two logits, the same sum at position 0, and the words of its first and its
      last token. Without a token in the text the first number is -inf.
    """
    n = logits.shape[1]
    inside = ops.where(words[..., None] >= 0, logits, -float("inf"))
    start, end = inside[..., 0], inside[..., 1]
    sums = [
        ops.pad(start[:, : n - i] + end[:, i:], [[0, 0], [0, i]], constant_values=-float("inf"))
        for i in range(min(longest, n))
    ]
    flat = ops.reshape(ops.stack(sums, axis=1), (-1, len(sums) * n))  # [b, longest * n]
    at = ops.argmax(flat, axis=1)
    first = at % n
    last = ops.minimum(first + at // n, n - 1)
    words_at = lambda place: ops.cast(ops.take_along_axis(words, place[:, None], axis=1)[:, 0], "float32")  # noqa: E731
    null = logits[:, 0, 0] + logits[:, 0, 1]
    return ops.stack([ops.max(flat, axis=1), null, words_at(first), words_at(last)], axis=1)
