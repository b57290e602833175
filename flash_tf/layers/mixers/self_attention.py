"""Multi-head self-attention: the Transformer's mixer."""

import keras
from keras import ops

from flash_tf.layers.common import check_counts, parts_of, projection
from flash_tf.layers.kernel_mixer import KernelMixer
from flash_tf.layers.masking import zero_padding
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.positions import runtime_zero, token_positions
from flash_tf.layers.streaming import check_next, next_positions
from kernels_xla import gau, grouped_query_attention, softmax_attention, softmax_plus
from kernels_xla.common.rotary import rotary
from kernels_xla.common.spec import KernelSpec, State, Tensor
from kernels_xla.gau import gau_attention

ROPE_THETA = 10_000.0
SOFTMAX = {"softmax": softmax_attention.SPEC, "softmax_plus": softmax_plus.SPEC}


@MIXERS.register("self_attention")
@keras.saving.register_keras_serializable("flash_tf")
class MultiHeadSelfAttention(KernelMixer):
    """`out = W_o concat_h(attend(q_h, k_h, v_h))`; one dense projection makes q, k and v.

    Source: Vaswani et al. 2017. FLASH's baselines and its Table 2 use the options `rotary`, `kernel`, `heads` and
    `gated`. LLaMA (arXiv:2302.13971) and its successors use `kv_heads` and `rope_theta`.

    Args:
      heads: h; must divide the width d into even parts. None for 12, or fewer if 12 do not divide it.
      causal: Whether position i may read only positions <= i.
      rotary: Whether queries and keys are rotated by position.
      kernel: "softmax"; "softmax_plus", whose temperature follows the number of tokens seen, as in GAU-alpha; or
        "relu2", squared ReLU over the number of tokens seen.
      gated: Whether attention's output is multiplied by silu(W_u x) [our definition; the paper gives none].
      use_bias: Whether the projections have biases.
      kv_heads: Heads of keys and values, which must divide `heads`: grouped-query attention, for "softmax" alone. None
        for as many as queries have.
      rope_theta: The longest wavelength of the rotation over 2 pi; it needs `rotary`.
      attention_dropout: Dropout rate of the attention weights in training; it needs a softmax, and no recomputation.
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

    def __init__(
        self,
        heads: int | None = None,
        causal: bool = False,
        rotary: bool = True,
        kernel: str = "softmax",
        gated: bool = False,
        use_bias: bool = True,
        kv_heads: int | None = None,
        rope_theta: float = ROPE_THETA,
        attention_dropout: float = 0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_counts(self, heads=heads, kv_heads=kv_heads)
        if kernel not in ("relu2", *SOFTMAX):
            needed = "MultiHeadSelfAttention: kernel must be 'softmax', 'softmax_plus' or 'relu2'"
            raise ValueError(f"{needed}, got {kernel!r}")
        self.heads, self.causal, self.rotary, self.kernel = heads, causal, rotary, kernel
        if kv_heads is not None and kernel != "softmax":
            raise ValueError(f"MultiHeadSelfAttention: kv_heads needs kernel 'softmax', got {kernel!r}")
        if rope_theta <= 1 or (not rotary and rope_theta != ROPE_THETA):
            needed = "MultiHeadSelfAttention needs rope_theta > 1, and the default without rotary"
            raise ValueError(f"{needed}, got {rope_theta} with rotary {rotary}")
        if attention_dropout and kernel not in SOFTMAX:
            raise ValueError(f"MultiHeadSelfAttention: attention_dropout needs a softmax, got kernel {kernel!r}")
        self.gated, self.use_bias, self.kv_heads, self.rope_theta = gated, use_bias, kv_heads, rope_theta
        self.set_dropout(attention_dropout)

    def build(self, x_shape: tuple) -> None:
        self.set_heads(x_shape, multiple=2 if self.rotary else 1)
        if self.kv_heads is not None and self.heads % self.kv_heads:
            needed = "MultiHeadSelfAttention: kv_heads must divide heads"
            raise ValueError(f"{needed}, got kv_heads {self.kv_heads}, heads {self.heads}")
        self.in_projection = projection(self, sum(self.widths), "in_projection", self.use_bias)
        self.out_projection = projection(self, self.width, "out_projection", self.use_bias)
        self.in_projection.build(x_shape)
        self.out_projection.build(x_shape)
        self.built = True

    @property
    def spec(self) -> KernelSpec:
        if self.kv_heads is not None:
            return grouped_query_attention.SPEC
        return SOFTMAX.get(self.kernel, softmax_attention.SPEC)  # squared ReLU has the same cost and state

    @property
    def widths(self) -> list[int]:
        """Of queries, keys, values and, if there is one, the gate."""
        kv = self.width if self.kv_heads is None else self.width // self.heads * self.kv_heads
        return [self.width, kv, kv, *[self.width] * self.gated]

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
        positions = token_positions(x, segment_ids, positions)
        attend = self.spec.fast if self.kernel in SOFTMAX else gau_attention
        q, k, v, *gate = self._project(x, positions)
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "offset": runtime_zero(positions)}
        out = attend(q, k, v, causal=self.causal, **masks, **self.training_options(training))
        return self._leave(out, gate)

    def _project(self, x, positions):
        """`[b, n, d]` -> q, k, v `[b, n, h, s]`, and the gate `[b, n, d]` if there is one.

        With `kv_heads`, keys and values have fewer heads, and q is `[b, n, k, h, s]`: h queries for each of them.
        """
        q, k, v, *gate = parts_of(self.in_projection, x, self.widths)
        lead, s = ops.shape(x)[:2], self.width // self.heads
        q, k, v = (ops.reshape(t, (*lead, t.shape[-1] // s, s)) for t in (q, k, v))
        if self.rotary:
            q, k = (rotary(t, positions, base=self.rope_theta) for t in (q, k))
        if self.kv_heads is not None:
            q = ops.reshape(q, (*lead, self.kv_heads, self.heads // self.kv_heads, s))
        return q, k, v, *gate

    def _leave(self, out, gate):
        """`[b, n, h, s]` -> `[b, n, d]`."""
        out = ops.cast(ops.reshape(out, (*ops.shape(out)[:2], self.width)), self.compute_dtype)  # of a narrower cache
        return self.out_projection(ops.silu(gate[0]) * out if gate else out)

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        s, groups = self.width // self.heads, self.kv_heads or 1
        grouped = {} if self.kv_heads is None else {"k": groups}
        return {"b": b, "n": n, "h": self.heads // groups, "s": s, "e": s, **grouped}

    def projection_flops(self) -> int:
        return 2 * self.width * (sum(self.widths) + self.width)

    def activations(self, n: int) -> int:
        return 3 * self.width + 2 * sum(self.widths) + 3 * n * self.heads  # float32 scores count twice

    def extend(
        self,
        x: Tensor,
        state: State,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
        precomputed: dict | None = None,
    ) -> tuple[Tensor, State]:
        """The next tokens of each row; see `flash_tf.layers.mixers`."""
        valid = check_next(self, self.obstacle, x, state, valid)
        positions = next_positions(state["position"], ops.shape(x)[1]) if positions is None else positions
        attend = self.spec.stream.extend if self.kernel in SOFTMAX else gau.extend
        q, k, v, *gate = self._project(x, positions)
        out, state = attend(state, q, k, v, valid=valid)
        return self._leave(out, gate), state
