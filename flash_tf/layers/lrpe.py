"""LRPE: a rotary embedding with learned frequencies."""

import keras
import numpy as np
from keras import ops

from flash_tf.layers.base import SameShape
from flash_tf.layers.positions import token_positions
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.rotary import rotate
from kernels_xla.common.spec import Tensor


@keras.saving.register_keras_serializable("flash_tf")
class LRPE(SameShape, keras.layers.Layer):
    """Reflects queries and keys, then rotates them by their token's position, at learned frequencies.

    If queries and keys go through one layer, their products depend on the distance only. Features are often not
    negative. The Householder reflection with one random vector lets a rotation use all directions.

    Source: Qin et al., "Linearized Relative Positional Encoding", arXiv:2307.09270, as TransNormer uses it. All layers
    of a width share the vector [our definition: no checkpoint needs to store it]. Channel i is paired with i + s/2.

    Args:
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, h, s]`, s even.
      positions: Integers `[b, n]` or `[1, n]`; 0 .. n-1 by default.

    Returns:
      Float tensor `[b, n, h, s]`; angles and products are float32.

    Example:
      >>> from keras import ops
      >>> LRPE()(ops.ones((1, 3, 2, 4))).shape
      TensorShape([1, 3, 2, 4])
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking, self.input_spec = True, keras.layers.InputSpec(ndim=4)

    def build(self, x_shape: tuple) -> None:
        s = x_shape[-1]
        if s % 2:
            raise ValueError(f"LRPE needs heads of even width, got {s}")
        start = lambda shape, dtype: ops.cast(10_000.0 ** (-np.arange(s // 2) / (s // 2)), dtype)  # noqa: E731
        self.theta = self.add_weight(name="theta", shape=(s // 2,), initializer=start, autocast=False)
        drawn = np.random.default_rng(0).normal(size=s)
        self.direction = drawn / np.linalg.norm(drawn)
        self.built = True

    def call(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        positions, dtype = token_positions(x, positions=positions), sum_dtype(x)
        angles = ops.expand_dims(ops.cast(positions, dtype), -1) * ops.cast(self.theta, dtype)  # [b, n, s / 2]
        cos, sin = (ops.expand_dims(table, 2) for table in (ops.cos(angles), ops.sin(angles)))
        wide, direction = ops.cast(x, dtype), ops.cast(self.direction, dtype)
        reflected = wide - 2 * ops.sum(wide * direction, axis=-1, keepdims=True) * direction
        return ops.cast(rotate(reflected, cos, sin), x.dtype)
