"""Text classification: the stack of the language models, mean pooling, and a small network."""

import keras
from keras import ops

from flash_tf.layers.common import normal, own_policies
from flash_tf.models.language_model import MODELS, LanguageModel, unpack
from flash_tf.registry import takes_options_of
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.spec import Tensor


@MODELS.register("classifier")
@takes_options_of(LanguageModel, without=("head_bias", "tie_embeddings"))
@keras.saving.register_keras_serializable("flash_tf")
class Classifier(LanguageModel):
    """Token ids `[b, n]` -> logits `[b, classes]`: `W_2 relu(W_1 mean(x) + b_1) + b_2` over the real tokens' x.

    Train it with `flash-tf train`, or with `compile`, `fit` and a loss from logits. Mean pooling, learned positions and
    the hidden layer follow the Long-Range Arena models in TransNormer's Table 6 (arXiv:2210.10340, appendix).

    Args:
      classes: Number of classes, 2 or more.
      hidden: Width of the hidden layer.
      position_embedding: As for `LanguageModel`; "learned" needs `max_length`.
      **kwargs: As for `LanguageModel`, except `head_bias` and `tie_embeddings`, which belong to a head over tokens.

    Call arguments:
      token_ids: Integers `[b, n]`, or a dictionary of all call arguments, as `fit` passes it.
      padding_mask: Bool `[b, n]`, True at real tokens; a row without one has the mean zero.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Logits `[b, classes]`, in the compute dtype.

    Example:
      >>> import numpy as np
      >>> options = {"vocabulary_size": 256, "width": 16, "depth": 2, "max_length": 50}
      >>> model = Classifier(2, mixer={"type": "flash", "chunk_size": 8, "key_dim": 8}, **options)
      >>> model(np.zeros((3, 50), "int32")).shape
      TensorShape([3, 2])
    """

    causal = False
    predicts_tokens = False
    HEAD = ("inner", "outer", "transform")
    PARTS = 1  # the network reads this many vectors of the model's width
    TEXTS = 1  # of a row
    FEWEST = 2  # classes

    def __init__(self, classes: int, hidden: int = 128, position_embedding: str | None = "learned", **kwargs):
        if classes < self.FEWEST or hidden < 1:
            raise ValueError(f"{type(self).__name__} needs classes >= 2 and hidden >= 1, got {classes} and {hidden}")
        if kwargs.pop("head_bias", False):
            raise ValueError(f"{type(self).__name__} has no head over tokens: it takes no head_bias")
        if not kwargs.pop("tie_embeddings", True):
            raise ValueError(f"{type(self).__name__} has no head over tokens: it needs tie_embeddings true, got False")
        super().__init__(**kwargs, position_embedding=position_embedding, head_bias=False)
        self.classes, self.hidden = classes, hidden
        dense = lambda width, **more: keras.layers.Dense(  # noqa: E731
            width, kernel_initializer=normal(), dtype=self.dtype_policy, **more
        )
        self.inner = dense(hidden, activation="relu", name="inner")
        self.outer = dense(classes, name="outer")

    def build(self, input_shape: tuple | None = None) -> None:
        super().build(input_shape)
        self.inner.build((None, self.PARTS * self.width))
        self.outer.build((None, self.hidden))
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
        return self.outer(self.inner(self.mean(**given, training=training)))

    def mean(self, token_ids: Tensor, padding_mask: Tensor | None = None, **options) -> Tensor:
        """The mean of the last layer's activations over the real tokens of each row, `[b, d]`."""
        x = self.encode(token_ids, padding_mask=padding_mask, **options)
        x = ops.cast(x, sum_dtype(x))
        if padding_mask is None:
            return ops.cast(ops.mean(x, axis=1), self.compute_dtype)
        real = ops.cast(ops.cast(padding_mask, "bool"), x.dtype)[..., None]
        total = ops.sum(ops.where(real > 0, x, ops.zeros_like(x)), axis=1)
        return ops.cast(total / ops.maximum(ops.sum(real, axis=1), 1.0), self.compute_dtype)

    def compute_output_spec(self, token_ids: Tensor, *arguments, **options) -> keras.KerasTensor:
        del arguments, options
        return keras.KerasTensor((unpack(token_ids, {})["token_ids"].shape[0], self.classes), self.compute_dtype)

    def flops(self, n: int, predicted: int = 0) -> int:
        """Forward FLOPs over one row, multiply-adds as two; n tokens are in each text, and no head runs on them."""
        del predicted
        return self.TEXTS * super().flops(n, 0) + 2 * self.hidden * (self.PARTS * self.width + self.classes)

    def activation_bytes(self, n: int, predicted: int, itemsize: int) -> int:
        """As for `LanguageModel`, without a head on tokens."""
        del predicted
        return self.TEXTS * super().activation_bytes(n, 0, itemsize)

    def decode_state_bytes(self, n: int, itemsize: int = 2) -> None:
        """None: it does not decode."""
