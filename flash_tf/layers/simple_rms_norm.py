"""SimpleRMSNorm: every vector at one length, nothing learned."""

import keras

from flash_tf.layers.base import SameShape
from kernels_xla.common.norms import simple_rms_norm
from kernels_xla.common.spec import Tensor


@keras.saving.register_keras_serializable("flash_tf")
class SimpleRMSNorm(SameShape, keras.layers.Layer):
    """Rescales each vector to a root mean square of one: `y = x / (||x|| / sqrt(d))`.

    Source: TransNormer (arXiv:2210.10340); see `kernels_xla.common.norms`.

    Args:
      **kwargs: Passed to `keras.layers.Layer`: `name`, `dtype`, `trainable`.

    Call arguments:
      x: Float tensor `[..., d]`.

    Returns:
      Float tensor `[..., d]` in the layer's compute dtype. Statistics are taken in float32.

    Masking: none needed; each vector is normalized alone.

    Example:
      >>> import numpy as np
      >>> np.array(SimpleRMSNorm()(np.array([[3.0, 4.0]]))).round(4)  # rms = sqrt(12.5)
      array([[0.8485, 1.1314]], dtype=float32)
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, x_shape: tuple) -> None:
        del x_shape  # it has no weights
        self.built = True

    def call(self, x: Tensor) -> Tensor:
        return simple_rms_norm(x)
