"""MC-TFM++: a Transformer's attention inside chunks, and linear attention across them."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.common import check_counts
from flash_tf.layers.linear_mixer import LinearMixer
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.offset_scale import OffsetScale
from kernels_xla.common.rotary import rotary
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.mc_tfm import SPEC


@MIXERS.register("mc_tfm")
@keras.saving.register_keras_serializable("flash_tf")
class MixedChunkSelfAttention(LinearMixer):
    """`out = W_o concat_h(softmax inside the chunk + linear attention across chunks)`, with biases.

    Source: FLASH (arXiv:2202.10447), section 4.4, "MC-TFM++": mixed chunk attention with multi-head self-attention
    instead of the gated unit. The paper gives no formula; `kernels_xla.mc_tfm` has ours. The queries and keys of the
    linear part come from the other queries and keys, channel by channel: `lin_q = gamma q + beta`, as in FLASH.

    Args:
      heads: h; must divide the width d, with `rotary` into even parts. None for 12, or fewer if 12 do not divide it.
      chunk_size: Tokens of a chunk, c. Part of the function: FLASH's is 256, 512 for PG-19.
      causal: Whether position i may read only positions <= i.
      rotary: Whether all queries and keys are rotated by position.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is neither read nor counted. A packed document gives the same output as alone if it starts on a
    multiple of `chunk_size`.

    Example:
      >>> MixedChunkSelfAttention(heads=2, chunk_size=4, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    lrpe = False

    def __init__(
        self, heads: int | None = None, chunk_size: int = 256, causal: bool = False, rotary: bool = True, **kwargs
    ):
        super().__init__(**kwargs)
        check_counts(self, heads=heads, chunk_size=chunk_size)
        self.heads, self.chunk_size, self.causal, self.rotary = heads, chunk_size, causal, rotary

    def build(self, x_shape: tuple) -> None:
        self.build_heads(x_shape, multiple=2 if self.rotary else 1)
        self.query_scale, self.key_scale = (
            OffsetScale([name], dtype=self.dtype_policy, name=f"{name}_scale") for name in ("lin_q", "lin_k")
        )
        self.query_scale.build(x_shape)
        self.key_scale.build(x_shape)
        self.built = True

    @property
    def align(self) -> int:
        """Documents must start at multiples of the chunk."""
        return self.chunk_size

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    @property
    def case(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, "causal": self.causal}

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        s = self.width // self.heads
        return {"b": b, "n": n, "h": self.heads, "s": s, "e": s}

    def enter(self, x: Tensor, positions: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        q, k, v = self.heads_of(x)
        heads = {"q": q, "k": k} | self._scaled(self.query_scale, q) | self._scaled(self.key_scale, k)
        heads = {name: rotary(part, positions) for name, part in heads.items()} if self.rotary else heads
        return {**heads, "v": v}, []

    def _scaled(self, layer, x):
        """Scales `[b, n, h, s]` by the layer's one head: each channel of each head has its own weight."""
        made = layer(ops.reshape(x, (*ops.shape(x)[:2], self.width)))
        return {name: self.split(part) for name, part in made.items()}

    def leave(self, out: Tensor, rest: list[Tensor]) -> Tensor:
        return self.out_projection(ops.reshape(out, (*ops.shape(out)[:2], self.width)))

    def projection_flops(self) -> int:
        return 8 * self.width**2

    def activations(self, n: int) -> int:
        c, s = min(n, self.chunk_size), self.width // self.heads
        return 15 * self.width + 3 * c * self.heads + round(4 * s * self.width / c)  # float32 sums for each chunk
