"""DiagAttention: attention inside blocks, used by TransNormer's first layers."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.common import check_counts
from flash_tf.layers.linear_mixer import LinearMixer
from flash_tf.layers.mixers import MIXERS
from kernels_xla.common.norms import simple_rms_norm
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.diag_attention import SPEC


@MIXERS.register("diag_attention")
@keras.saving.register_keras_serializable("flash_tf")
class DiagAttention(LinearMixer):
    """`out = W_o concat_h(attend(q_h, k_h, v_h))` among the tokens of a block, with biases.

    Source: TransNormer (arXiv:2210.10340), section 4.2; see `kernels_xla.diag_attention`. T1 takes "relu" and
    normalizes the sums of all heads together; T2 takes "softmax".

    Matrices start from N(0, 0.02), as in every system here and in the authors' masked models. The authors' causal
    models start from Xavier's distribution, 0.044 at a width of 512.

    Args:
      heads: h; must divide the width d, with `lrpe` into even parts. None for 12, or fewer if 12 do not divide it.
      chunk_size: Tokens of a block, c. Part of the function: 64 in the paper.
      causal: Whether position i may read only positions <= i.
      attention: "softmax", or "relu", followed by `x / (||x|| / sqrt(d))` before W_o.
      lrpe: Whether queries and keys are rotated by position at learned frequencies; see `flash_tf.layers.lrpe`.
      attention_dropout: Dropout rate of the attention weights in training; it needs no recomputation.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read. A packed document gives the same output as alone if it starts on a multiple of
    `chunk_size`.

    Example:
      >>> DiagAttention(heads=2, chunk_size=4, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    def __init__(
        self,
        heads: int | None = None,
        chunk_size: int = 64,
        causal: bool = False,
        attention: str = "softmax",
        lrpe: bool = True,
        attention_dropout: float = 0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_counts(self, heads=heads, chunk_size=chunk_size)
        if attention not in ("softmax", "relu"):
            raise ValueError(f"DiagAttention: attention must be 'softmax' or 'relu', got {attention!r}")
        self.heads, self.chunk_size, self.causal, self.attention, self.lrpe = heads, chunk_size, causal, attention, lrpe
        self.set_dropout(attention_dropout)

    def build(self, x_shape: tuple) -> None:
        self.build_heads(x_shape, multiple=2 if self.lrpe else 1)
        self.built = True

    @property
    def align(self) -> int:
        """Documents must start at multiples of the block."""
        return self.chunk_size

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    @property
    def case(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, "causal": self.causal, "weights": self.attention}

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        s = self.width // self.heads
        return {"b": b, "n": n, "h": self.heads, "s": s, "e": s}

    def enter(self, x: Tensor, positions: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        q, k, v = self.heads_of(x)
        q, k = (self.turn(part, positions=positions) for part in (q, k)) if self.lrpe else (q, k)
        return {"q": q, "k": k, "v": v}, []

    def leave(self, out: Tensor, rest: list[Tensor]) -> Tensor:
        out = ops.reshape(out, (*ops.shape(out)[:2], self.width))
        out = simple_rms_norm(out) if self.attention == "relu" else out
        return self.out_projection(out)

    def projection_flops(self) -> int:
        return 8 * self.width**2

    def activations(self, n: int) -> int:
        return 9 * self.width + 3 * min(n, self.chunk_size) * self.heads
