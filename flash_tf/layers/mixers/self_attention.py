"""Multi-head self-attention: the Transformer's mixer."""

import keras
from keras import ops

from flash_tf.layers.common import check_counts, parts_of, projection
from flash_tf.layers.kernel_mixer import KernelMixer
from flash_tf.layers.masking import zero_padding
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.positions import runtime_zero, token_positions
from flash_tf.layers.streaming import check_streams, next_positions
from kernels_xla import gau
from kernels_xla import softmax_attention as softmax
from kernels_xla.common.rotary import rotary
from kernels_xla.common.spec import State, Tensor
from kernels_xla.gau import gau_attention
from kernels_xla.softmax_attention import SPEC


@MIXERS.register("self_attention")
@keras.saving.register_keras_serializable("flash_tf")
class MultiHeadSelfAttention(KernelMixer):
    """`out = W_o concat_h(attend(q_h, k_h, v_h))`; one dense projection makes q, k and v.

    Source: Vaswani et al. 2017. FLASH's baselines and its Table 2 use the options `rotary`, `kernel`, `heads` and
    `gated`.

    Args:
      heads: h; must divide the width d into even parts. None for 12, or fewer if 12 do not divide it.
      causal: Whether position i may read only positions <= i.
      rotary: Whether queries and keys are rotated by position.
      kernel: "softmax", or "relu2": squared ReLU over the number of tokens seen.
      gated: Whether attention's output is multiplied by silu(W_u x) [our definition; the paper gives none].
      use_bias: Whether the projections have biases.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read. A packed document gives the same output as alone.

    Example:
      >>> MultiHeadSelfAttention(heads=2, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    grows = True
    spec = SPEC

    def __init__(
        self,
        heads: int | None = None,
        causal: bool = False,
        rotary: bool = True,
        kernel: str = "softmax",
        gated: bool = False,
        use_bias: bool = True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_counts(self, heads=heads)
        if kernel not in ("relu2", "softmax"):
            raise ValueError(f"MultiHeadSelfAttention: kernel must be 'softmax' or 'relu2', got {kernel!r}")
        self.heads, self.causal, self.rotary, self.kernel = heads, causal, rotary, kernel
        self.gated, self.use_bias = gated, use_bias
        self.supports_masking = True

    def build(self, x_shape: tuple) -> None:
        self.set_heads(x_shape, multiple=2 if self.rotary else 1)
        d = self.width
        self.in_projection = projection(self, (4 if self.gated else 3) * d, "in_projection", self.use_bias)
        self.out_projection = projection(self, d, "out_projection", self.use_bias)
        self.in_projection.build(x_shape)
        self.out_projection.build(x_shape)
        self.built = True

    def call(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        x, padding_mask = zero_padding(x, padding_mask, segment_ids, mask)
        positions = token_positions(x, segment_ids) if positions is None else positions
        attend = softmax.softmax_attention if self.kernel == "softmax" else gau_attention
        q, k, v, *gate = self._project(x, positions)
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "offset": runtime_zero(positions)}
        out = attend(q, k, v, causal=self.causal, **masks)
        return self._leave(out, gate)

    def _project(self, x, positions):
        """`[b, n, d]` -> q, k, v `[b, n, h, s]`, and the gate `[b, n, d]` if there is one."""
        q, k, v, *gate = parts_of(self.in_projection, x, [self.width] * (4 if self.gated else 3))
        q, k, v = (ops.reshape(t, (*ops.shape(x)[:2], self.heads, self.width // self.heads)) for t in (q, k, v))
        return (*((rotary(t, positions) for t in (q, k)) if self.rotary else (q, k)), v, *gate)

    def _leave(self, out, gate):
        """`[b, n, h, s]` -> `[b, n, d]`."""
        out = ops.reshape(out, (*ops.shape(out)[:2], self.width))
        return self.out_projection(ops.silu(gate[0]) * out if gate else out)

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        s = self.width // self.heads
        return {"b": b, "n": n, "h": self.heads, "s": s, "e": s}

    def projection_flops(self) -> int:
        return 2 * self.width**2 * (5 if self.gated else 4)

    def activations(self, n: int) -> int:
        return (9 + 2 * self.gated) * self.width + 3 * n * self.heads  # float32 scores count twice

    def extend(
        self,
        x: Tensor,
        state: State,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
        precomputed: dict | None = None,
    ) -> tuple[Tensor, State]:
        """The next tokens of each row; see `flash_tf.layers.mixers`."""
        check_streams(self, self.obstacle)
        positions = next_positions(state["position"], ops.shape(x)[1]) if positions is None else positions
        attend = softmax.extend if self.kernel == "softmax" else gau.extend
        q, k, v, *gate = self._project(x, positions)
        out, state = attend(state, q, k, v, valid=valid)
        return self._leave(out, gate), state
