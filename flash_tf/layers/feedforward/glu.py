"""Gated linear unit as a feed-forward network."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.base import SameShape
from flash_tf.layers.common import activation, check_activation, options, parts_of, projection, width_of
from flash_tf.layers.feedforward import FEEDFORWARDS
from flash_tf.layers.fused import check_implementation, runs_fused
from flash_tf.layers.remat import Recomputed
from kernels_pallas import glu as fused
from kernels_xla.common.spec import Tensor


@FEEDFORWARDS.register("glu")
@keras.saving.register_keras_serializable("flash_tf")
class GLU(SameShape, Recomputed, keras.layers.Layer):
    """`out = W_o (act(W_1 x) * W_2 x)`; one dense projection makes both branches.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202; FLASH's Transformer++. Its "expansion rate 4"
    means a hidden width of 8d/3: with 4d its 110 M parameters would be 138 M.

    Args:
      hidden: Width of each branch; 8d/3, rounded, by default.
      activation: Name of a Keras activation, or "gelu_tanh", GELU by a hyperbolic tangent as in GPT-2.
      use_bias: Whether the projections have biases.
      implementation: How a training step computes the gate: "xla", as einsums; "pallas", by fused kernels on an NVIDIA
        GPU from Hopper on, with "gelu", "gelu_tanh" or "silu"; "auto", where these were measured to be faster. The
        function is the same.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[..., d]`.

    Returns:
      Float tensor `[..., d]`.

    Example:
      >>> from keras import ops
      >>> GLU()(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    tokenwise = True

    def __init__(
        self,
        hidden: int | None = None,
        activation: str = "gelu",
        use_bias: bool = True,
        implementation: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        if hidden is not None and hidden < 1:
            raise ValueError(f"GLU needs hidden >= 1, got {hidden}")
        check_activation(self, activation)
        self.hidden, self.activation, self.use_bias = hidden, activation, use_bias
        self.implementation = implementation
        check_implementation(self)
        self.supports_masking = True

    def build(self, x_shape: tuple) -> None:
        self.width = width_of(self, x_shape)
        self.inner = self.hidden or round(8 * self.width / 3)
        self.in_projection = projection(self, 2 * self.inner, "in_projection", self.use_bias)
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
        if training and self._runs_fused(tuple(x.shape[:-1]), x.dtype):
            kernel = ops.cast(self.in_projection.kernel, x.dtype)
            bias = self.in_projection.bias if self.use_bias else ops.zeros(kernel.shape[1:])
            gated = fused.gated(ops.matmul(x, kernel), ops.cast(bias, x.dtype), activation=self.activation)
        else:
            gate, value = parts_of(self.in_projection, x, [self.inner] * 2)
            gated = activation(self.activation)(gate) * value
        return self.out_projection(gated)

    def check_training(self, b: int, n: int) -> None:
        """Raises a ValueError if a training step over `[b, n]` tokens must run fused kernels, and cannot here."""
        self._runs_fused((b, n), self.compute_dtype)

    def _runs_fused(self, lead, dtype):
        return runs_fused(self, lead, fused, lambda: fused.sizes((*lead, 2 * self.inner), dtype, self.activation))

    def flops(self, n: int) -> int:
        return 6 * n * self.width * self.inner

    def activations(self, n: int) -> int:
        return 2 * self.width + 4 * self.inner

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **options(self)}
