"""ScaledSin: sinusoidal absolute positions times one learned number."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.base import Base
from kernels_xla.common.accelerator import on_tpu
from kernels_xla.common.rotary import made_once, sinusoids
from kernels_xla.common.spec import Tensor


@keras.saving.register_keras_serializable("flash_tf")
class ScaledSinusoidalEmbedding(Base, keras.layers.Layer):
    """Absolute positions: `P[p] = a concat(sin(p theta), cos(p theta))`, `theta_i = 10000^(-i / (d/2))`.

    Source: FLASH (arXiv:2202.10447), appendix B.2 and its pseudocode; `a` starts at 1/sqrt(d).

    Args:
      width: d, even.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      positions: Integers `[..., n]`.

    Returns:
      Float tensor `[..., d]` in the compute dtype; angles are float32.

    Example:
      >>> ScaledSinusoidalEmbedding(8)(ops.arange(5)).shape
      TensorShape([5, 8])
    """

    def __init__(self, width: int, **kwargs):
        super().__init__(**kwargs)
        if width < 2 or width % 2:
            raise ValueError(f"ScaledSinusoidalEmbedding needs an even width, 2 or more, got {width}")
        self.width = width
        self.autocast = False  # of positions that come as floats

    def build(self, positions_shape: tuple) -> None:
        del positions_shape
        self.a = self.add_weight(name="a", shape=(), initializer=keras.initializers.Constant(self.width**-0.5))
        self.built = True

    def call(self, positions: Tensor) -> Tensor:
        wide = "float64" if self.compute_dtype == "float64" else "float32"
        cos, sin = sinusoids(positions, self.width, wide)
        table = ops.concatenate([sin, cos], axis=-1)
        if on_tpu():
            table = made_once(table, positions)
        return ops.cast(ops.cast(self.a, wide) * table, self.compute_dtype)

    def compute_output_shape(self, positions_shape: tuple) -> tuple:
        return (*positions_shape, self.width)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}
