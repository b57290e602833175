"""ScaleNorm: one learned length for every vector."""

from typing import Any

import keras

from flash_tf.layers.base import SameShape
from flash_tf.layers.common import options
from kernels_xla.common.norms import scale_norm
from kernels_xla.common.spec import Tensor


@keras.saving.register_keras_serializable("flash_tf")
class ScaleNorm(SameShape, keras.layers.Layer):
    """Rescales each vector to one learned length: `y = g x / sqrt(mean(x^2) + epsilon)`.

    Source: Nguyen and Salazar, "Transformers without Tears", arXiv:1910.05895; epsilon inside the root as in the
    appendix of FLASH. RMSNorm learns one number per feature instead.

    Args:
      epsilon: Added to the mean square; keeps the zero vector at zero.
      **kwargs: Passed to `keras.layers.Layer`: `name`, `dtype`, `trainable`.

    Call arguments:
      x: Float tensor `[..., d]`.

    Returns:
      Float tensor `[..., d]` in the layer's compute dtype. Statistics are taken in float32.

    Masking: none needed; each vector is normalized alone.

    Example:
      >>> import numpy as np
      >>> np.array(ScaleNorm()(np.array([[3.0, 4.0]]))).round(4)  # rms = sqrt(12.5)
      array([[0.8485, 1.1314]], dtype=float32)
    """

    def __init__(self, epsilon: float = 1e-5, **kwargs):
        super().__init__(**kwargs)
        if epsilon <= 0:
            raise ValueError(f"ScaleNorm needs epsilon > 0, got {epsilon}")
        self.epsilon = epsilon
        self.supports_masking = True

    def build(self, x_shape: tuple) -> None:
        del x_shape  # one number, whatever the width
        self.g = self.add_weight(name="g", shape=(), initializer="ones")
        self.built = True

    def call(self, x: Tensor) -> Tensor:
        return scale_norm(x, self.g, epsilon=self.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **options(self)}
