"""The Transformer's two-layer feed-forward network."""

from typing import Any

import keras

from flash_tf.layers.base import SameShape
from flash_tf.layers.common import activation, check_activation, options, projection, width_of
from flash_tf.layers.feedforward import FEEDFORWARDS
from flash_tf.layers.remat import Recomputed
from kernels_xla.common.nvidia import whole_gradient
from kernels_xla.common.spec import Tensor


@FEEDFORWARDS.register("mlp")
@keras.saving.register_keras_serializable("flash_tf")
class MLP(SameShape, Recomputed, keras.layers.Layer):
    """`out = W_2 act(W_1 x)`.

    Source: Vaswani et al. 2017, equation 2, with the GELU of FLASH's baselines.

    Args:
      hidden: Width of the hidden layer; 4d by default.
      activation: Name of a Keras activation, or "gelu_tanh", GELU by a hyperbolic tangent as in GPT-2.
      use_bias: Whether the projections have biases.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[..., d]`.

    Returns:
      Float tensor `[..., d]`.

    Example:
      >>> from keras import ops
      >>> MLP()(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    tokenwise = True

    def __init__(self, hidden: int | None = None, activation: str = "gelu", use_bias: bool = True, **kwargs):
        super().__init__(**kwargs)
        if hidden is not None and hidden < 1:
            raise ValueError(f"MLP needs hidden >= 1, got {hidden}")
        check_activation(self, activation)
        self.hidden, self.activation, self.use_bias = hidden, activation, use_bias
        self.supports_masking = True

    def build(self, x_shape: tuple) -> None:
        self.width = width_of(self, x_shape)
        self.inner = self.hidden or 4 * self.width
        self.in_projection = projection(self, self.inner, "in_projection", self.use_bias)
        self.out_projection = projection(self, self.width, "out_projection", self.use_bias)
        self.in_projection.build(x_shape)
        self.out_projection.build((*x_shape[:-1], self.inner))
        self.built = True

    def call(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        training: bool | None = None,
    ) -> Tensor:
        return self.out_projection(activation(self.activation)(whole_gradient(self.in_projection(x))))

    def flops(self, n: int) -> int:
        return 4 * n * self.width * self.inner

    def activations(self, n: int) -> int:
        return 2 * self.width + 2 * self.inner

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **options(self)}
