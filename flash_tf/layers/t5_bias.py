"""T5's relative position bias: a learned number for each bucket of distances."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from flash_tf.layers.base import Base
from flash_tf.layers.common import normal, options
from kernels_xla.common.rotary import relative_bias
from kernels_xla.common.spec import Tensor

BUCKETS, FARTHEST = 32, 128  # T5's


@keras.saving.register_keras_serializable("flash_tf")
class T5Bias(Base, keras.layers.Layer):
    """The bias of each distance within a window of m tokens: `scale * table[bucket(d)]`, for d = -m .. m - 1.

    Source: Raffel et al., "T5", arXiv:1910.10683, section 2.1. A small distance has a bucket of its own, larger ones
    share buckets evenly in their logarithm up to 128. Without `causal`, later tokens have the second half of them.

    Args:
      window: m.
      causal: Whether only earlier tokens are read.
      scale: A constant factor.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      n: Number of positions, m at most.

    Returns:
      Float tensor `[n, n]`, float32.

    Example:
      >>> T5Bias(window=8, causal=True)(n=5).shape
      TensorShape([5, 5])
    """

    def __init__(self, window: int, causal: bool = False, scale: float = 1.0, **kwargs):
        super().__init__(**kwargs)
        if window < 1:
            raise ValueError(f"T5Bias needs window >= 1, got {window}")
        self.window, self.causal, self.scale = window, causal, scale

    def build(self, input_shape: tuple | None = None) -> None:
        del input_shape
        self.table = self.add_weight(name="table", shape=(BUCKETS,), initializer=normal())
        self.built = True

    def call(self, n: int) -> Tensor:
        if n > self.window:
            raise ValueError(f"T5Bias has a window of {self.window} positions, got n = {n}")
        at = ops.arange(n, dtype="int32")
        return relative_bias(self.by_distance(), None, at, at)

    def by_distance(self) -> Tensor:
        """The bias of distance d, query minus key, at place m + d: `[2m]`. Attention passes it to its kernel."""
        return self.scale * ops.take(self.table, self.buckets())

    def buckets(self) -> np.ndarray:
        """The bucket of each distance, int32 `[2m]`."""
        distance = np.arange(-self.window, self.window)
        count = BUCKETS if self.causal else BUCKETS // 2
        size = np.maximum(distance, 0) if self.causal else np.abs(distance)
        exact = count // 2
        # In float32, as the public implementations have it: some distances lie on the edge of two buckets.
        far = np.log(np.maximum(size, 1).astype("float32") / np.float32(exact)) / np.float32(math.log(FARTHEST / exact))
        shared = exact + (far * np.float32(count - exact)).astype("int32")
        own = np.where(size < exact, size, np.minimum(shared, count - 1))
        return (own + (0 if self.causal else count * (distance < 0))).astype("int32")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **options(self)}
