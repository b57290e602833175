"""The gated attention unit as cross-attention: queries of one text, keys and values of another."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.base import Base
from flash_tf.layers.common import options, parts_of, projection, width_of
from flash_tf.layers.masking import zero_padding
from flash_tf.layers.offset_scale import OffsetScale
from kernels_xla.common.spec import Tensor
from kernels_xla.gau_cross import gau_cross_attention


@keras.saving.register_keras_serializable("flash_tf")
class CrossGatedAttention(Base, keras.layers.Layer):
    """`out = W_o (u * attend(q, k, v))` with `u, z = silu(W_x x)`, `v, z' = silu(W_m memory)`, q of z and k of z'.

    Source: none; our definition. FLASH's unit (arXiv:2202.10447, section 2.2) derives gate, queries, keys and values
    from one text. Here gate and queries come from `x`, and keys and values from `memory`, each with its own projection.
    q and k are scaled and offset as in FLASH. Squared-ReLU weights are divided by the number of real tokens of the
    memory. There is no rotary embedding and no relative bias, because positions in two texts have no distance.

    Args:
      key_dim: Width s of z.
      expansion: e / d, the width of gate and values over the width of `x`.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      memory: Float tensor `[b, m, d']`, of any width d'.
      padding_mask: Bool `[b, n]`, True at real tokens of `x`.
      memory_mask: Bool `[b, m]`, True at real tokens of `memory`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding of the memory is neither read nor counted. Outputs at padding of `x` are undefined.

    Example:
      >>> CrossGatedAttention(key_dim=8)(ops.ones((2, 10, 16)), ops.ones((2, 7, 12))).shape
      TensorShape([2, 10, 16])
    """

    def __init__(self, key_dim: int = 128, expansion: int = 2, **kwargs):
        super().__init__(**kwargs)
        if key_dim < 1 or expansion < 1:
            raise ValueError(f"CrossGatedAttention needs key_dim and expansion >= 1, got {key_dim} and {expansion}")
        self.key_dim, self.expansion = key_dim, expansion
        self.supports_masking = True

    def build(self, x_shape: tuple, memory_shape: tuple) -> None:
        self.width = width_of(self, x_shape)
        inner = self.expansion * self.width
        self.query_projection = projection(self, inner + self.key_dim, "query_projection")
        self.memory_projection = projection(self, inner + self.key_dim, "memory_projection")
        self.out_projection = projection(self, self.width, "out_projection")
        self.query_scale = OffsetScale(("q",), dtype=self.dtype_policy, name="query_scale")
        self.key_scale = OffsetScale(("k",), dtype=self.dtype_policy, name="key_scale")
        self.query_projection.build(x_shape)
        self.memory_projection.build(memory_shape)
        self.out_projection.build((*x_shape[:-1], inner))
        self.query_scale.build((*x_shape[:-1], self.key_dim))
        self.key_scale.build((*memory_shape[:-1], self.key_dim))
        self.built = True

    def call(
        self,
        x: Tensor,
        memory: Tensor,
        padding_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        training: bool | None = None,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        for name, text in (("x", x), ("memory", memory)):
            if len(text.shape) != 3:
                raise ValueError(f"{self.name} needs {name} of the shape [b, n, d], got {tuple(text.shape)}")
        if None not in (x.shape[0], memory.shape[0]) and x.shape[0] != memory.shape[0]:
            raise ValueError(f"{self.name} needs a memory of {x.shape[0]} rows, as x, got {memory.shape[0]}")
        x, padding_mask = zero_padding(x, padding_mask, mask=x_mask)
        memory, memory_mask = zero_padding(memory, memory_mask, name="memory_mask")
        widths = [self.expansion * self.width, self.key_dim]
        u, z = parts_of(self.query_projection, x, widths, ops.silu)
        v, z_memory = parts_of(self.memory_projection, memory, widths, ops.silu)
        q, k = self.query_scale(z)["q"], self.key_scale(z_memory)["k"]
        one_head = (ops.expand_dims(part, 2) for part in (q, k, v))
        attended = gau_cross_attention(*one_head, padding_mask=padding_mask, memory_mask=memory_mask)
        return self.out_projection(u * attended[:, :, 0])

    def compute_output_shape(self, x_shape: tuple, memory_shape: tuple) -> tuple:
        del memory_shape
        return x_shape  # Keras on JAX cannot trace an unknown length

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **options(self)}
