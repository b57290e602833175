"""FAVOR+'s random features and their directions."""

from typing import Any

import keras
import numpy as np
from keras import ops

from flash_tf.layers.base import Base
from kernels_xla.common.random_features import random_features
from kernels_xla.common.spec import Tensor


@keras.saving.register_keras_serializable("flash_tf")
class RandomFeatures(Base, keras.layers.Layer):
    """Positive features of queries and keys. Linear attention with them equals softmax attention on average.

    Source: Choromanski et al., "Rethinking Attention with Performers", arXiv:2009.14794; see
    `kernels_xla.common.random_features`. Directions are normal, orthogonal to each other in blocks of s, the same for
    all heads, and never trained. They are weights, so that they are saved and are a program's arguments, not its
    constants. One draw serves all layers of a width, and training does not draw again [our definitions]. In bfloat16
    they are rounded as any matrix: the directions change, but queries and keys keep the same ones.

    Args:
      count: r, the number of features.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, h, s]`.
      query: Whether x holds queries rather than keys.

    Returns:
      Float tensor `[b, n, h, r]`, positive; exponentials are float32.

    Example:
      >>> RandomFeatures(24)(ops.ones((1, 3, 2, 4))).shape
      TensorShape([1, 3, 2, 24])
    """

    def __init__(self, count: int = 128, **kwargs):
        super().__init__(**kwargs)
        if count < 1:
            raise ValueError(f"RandomFeatures needs count >= 1, got {count}")
        self.count, self.supports_masking, self.input_spec = count, True, keras.layers.InputSpec(ndim=4)

    def build(self, x_shape: tuple) -> None:
        if self.compute_dtype == "float16":
            raise ValueError("RandomFeatures needs the range of bfloat16 or float32, got float16")
        start = lambda shape, dtype: ops.cast(orthogonal_normal(*shape), dtype)  # noqa: E731
        shape = (self.count, x_shape[-1])
        self.directions = self.add_weight(name="directions", shape=shape, initializer=start, trainable=False)
        self.built = True

    def call(self, x: Tensor, query: bool = False) -> Tensor:
        return random_features(x, ops.cast(self.directions, x.dtype), query=query)

    def compute_output_shape(self, x_shape: tuple) -> tuple:
        return (*x_shape[:-1], self.count)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "count": self.count}


def orthogonal_normal(count: int, width: int) -> np.ndarray:
    """`[count, width]`: normal vectors, orthogonal within each block of `width`; the same in every call."""
    rng = np.random.default_rng(0)
    rotations, triangles = np.linalg.qr(rng.normal(size=(-(-count // width), width, width)))
    rotations *= np.sign(np.diagonal(triangles, axis1=1, axis2=2))[:, None]  # makes all rotations equally likely
    lengths = np.linalg.norm(rng.normal(size=(count, width)), axis=1)
    return rotations.reshape(-1, width)[:count] * lengths[:, None]
