"""Relative position bias of GAU in its two-vector form."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.base import Base
from flash_tf.layers.common import normal
from kernels_xla.common.rotary import relative_bias
from kernels_xla.common.spec import Tensor

STARTS = ("normal", "symmetric")


@keras.saving.register_keras_serializable("flash_tf")
class RelativeBias(Base, keras.layers.Layer):
    """Bias on attention scores, `b[i - j] = rotate_i(a) . rotate_j(b)`, for any length.

    Source: FLASH's appendix uses this form for n above 512. Here it serves every length, so that a model is not tied to
    one. It has 2 x width parameters. An attention layer passes `a` and `b` to its kernel, which computes the bias.

    Args:
      width: r, even.
      start: "normal": a and b are drawn from N(0, 0.02), as in the paper. "symmetric" [ours]: a is drawn and b = a, so
        that the bias starts positive at distance 0, and smaller at all others, equally on both sides.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      n: Number of positions.

    Returns:
      Float tensor `[n, n]`, float32.

    Example:
      >>> RelativeBias()(n=5).shape
      TensorShape([5, 5])
    """

    def __init__(self, width: int = 128, start: str = "normal", **kwargs):
        super().__init__(**kwargs)
        if width < 2 or width % 2:
            raise ValueError(f"RelativeBias needs an even width, 2 or more, got {width}")
        if start not in STARTS:
            raise ValueError(f"RelativeBias: start must be one of {', '.join(STARTS)}, got {start!r}")
        self.width, self.start = width, start

    def build(self, input_shape: tuple | None = None) -> None:
        del input_shape
        first = normal()  # an initializer gives the same numbers each time
        second = first if self.start == "symmetric" else normal()
        self.a = self.add_weight(name="a", shape=(self.width,), initializer=first)
        self.b = self.add_weight(name="b", shape=(self.width,), initializer=second)
        self.built = True

    def call(self, n: int) -> Tensor:
        at = ops.arange(n, dtype="int32")
        return relative_bias(self.a, self.b, at, at)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width, "start": self.start}
