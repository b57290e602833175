"""Rotary position embedding as a layer."""

from typing import Any

import keras

from flash_tf.layers.base import SameShape
from flash_tf.layers.positions import token_positions
from kernels_xla.common.rotary import rotary
from kernels_xla.common.spec import Tensor


@keras.saving.register_keras_serializable("flash_tf")
class RotaryEmbedding(SameShape, keras.layers.Layer):
    """Rotates queries and keys by their token's position, so that products depend on distance.

    Source: Su et al., "RoFormer", arXiv:2104.09864; channel i is paired with i + s/2. The layer has no weights.

    Args:
      base: Longest wavelength over 2 pi.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, h, s]`, s even.
      positions: Integers `[b, n]` or `[1, n]`; 0 .. n-1 by default.

    Returns:
      Float tensor `[b, n, h, s]`; angles and products are float32.

    Example:
      >>> from keras import ops
      >>> RotaryEmbedding()(ops.ones((1, 3, 2, 4))).shape
      TensorShape([1, 3, 2, 4])
    """

    def __init__(self, base: float = 10_000.0, **kwargs):
        super().__init__(**kwargs)
        if base <= 1:
            raise ValueError(f"RotaryEmbedding needs base > 1, got {base}")
        self.base = base
        self.supports_masking, self.input_spec = True, keras.layers.InputSpec(ndim=4)

    def call(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return rotary(x, token_positions(x, positions=positions), base=self.base)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "base": self.base}
