"""Relative position bias of GAU in its two-vector form."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.common import normal
from kernels_xla.common.rotary import relative_bias
from kernels_xla.common.spec import Tensor


@keras.saving.register_keras_serializable("flash_tf")
class RelativeBias(keras.layers.Layer):
    """Bias on attention scores, `b[i - j] = rotate_i(a) . rotate_j(b)`, for any length.

    Source: FLASH's appendix uses this form for n above 512. Here it serves every length, so that a model is not tied to
    one. It has 2 x width parameters. An attention layer passes `a` and `b` to its kernel, which computes the bias.

    Args:
      width: r, even.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      n: Number of positions.

    Returns:
      Float tensor `[n, n]`, float32.

    Example:
      >>> RelativeBias()(n=5).shape
      TensorShape([5, 5])
    """

    def __init__(self, width: int = 128, **kwargs):
        super().__init__(**kwargs)
        if width % 2:
            raise ValueError(f"RelativeBias needs an even width, got {width}")
        self.width = width

    def build(self, input_shape: tuple | None = None) -> None:
        del input_shape
        self.a = self.add_weight(name="a", shape=(self.width,), initializer=normal())
        self.b = self.add_weight(name="b", shape=(self.width,), initializer=normal())
        self.built = True

    def call(self, n: int) -> Tensor:
        at = ops.arange(n, dtype="int32")
        return relative_bias(self.a, self.b, at, at)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}
