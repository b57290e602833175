"""The gated attention unit around any attention: projections, gate, heads."""

from keras import ops

from flash_tf.layers.common import parts_of, projection
from flash_tf.layers.kernel_mixer import KernelMixer
from flash_tf.layers.offset_scale import OffsetScale
from flash_tf.layers.positions import runtime_zero, token_positions
from flash_tf.layers.relative_bias import RelativeBias
from flash_tf.layers.streaming import check_streams, next_positions
from kernels_xla.common.rotary import rotate, turns


class GatedAttentionUnit(KernelMixer):
    """`out = W_o (u * attend(heads(z), v))` with `u, v, z = silu(W_i x)`: a GLU whose value branch attends.

    Source: FLASH (arXiv:2202.10447), section 2.2, Figure 2. One dense in-projection `[d, 2e + s]`.

    A subclass has `head_names` and implements `attend`. It has at least the options below, as attributes.

    Args:
      key_dim: Width s of the shared representation z, even.
      expansion: e / d.
      gated: Whether u exists. Without it v takes its place too, 2e wide ("no gating" in Table 1 of the paper).
      relative_bias: Whether scores get a learned Toeplitz bias.
      scale: "normalized", or "paper_appendix"; see the kernel.
    """

    head_names: tuple[str, ...] = ()

    def _check(self):
        name = type(self).__name__
        if self.key_dim < 2 or self.key_dim % 2:
            raise ValueError(f"{name} needs an even key_dim of at least 2, for rotary pairs, got {self.key_dim}")
        if self.expansion < 1:
            raise ValueError(f"{name} needs expansion >= 1, got {self.expansion}")
        if self.scale not in ("normalized", "paper_appendix"):
            raise ValueError(f"{name}: scale must be 'normalized' or 'paper_appendix', got {self.scale!r}")
        self.supports_masking = True

    @property
    def value_width(self) -> int:
        """Width of v: e, or 2e without the gate."""
        return self.expansion * self.width * (1 if self.gated else 2)

    def build(self, x_shape):
        self.width = x_shape[-1]
        paper_start = self.scale == "paper_appendix" and self.relative_bias
        self.in_projection = projection(self, 2 * self.expansion * self.width + self.key_dim, "in_projection")
        self.out_projection = projection(self, self.width, "out_projection")
        self.offset_scale = OffsetScale(
            self.head_names, "normal" if paper_start else "ones", dtype=self.dtype_policy, name="offset_scale"
        )
        self.bias = RelativeBias(dtype=self.dtype_policy, name="relative_bias") if self.relative_bias else None

        self.in_projection.build(x_shape)
        self.out_projection.build((*x_shape[:-1], self.value_width))
        self.offset_scale.build((*x_shape[:-1], self.key_dim))
        if self.bias is not None:
            self.bias.build()
        self.built = True

    def call(self, x, padding_mask=None, segment_ids=None, positions=None, training=None, **masks):
        *gate, v, z = self.project(x)
        positions = token_positions(x, segment_ids) if positions is None else positions
        heads = self.turn(self.offset_scale(z), positions)
        bias = {} if self.bias is None else {"a": self.bias.a, "b": self.bias.b}
        masks |= {"padding_mask": padding_mask, "segment_ids": segment_ids, "offset": runtime_zero(positions)}
        attended = self.attend(heads, v, **bias, **masks)
        return self.out_projection(gate[0] * attended if gate else attended)

    def project(self, x):
        """`[b, n, d]` -> u, if there is a gate, and v `[b, n, e]`, and z `[b, n, s]`."""
        widths = [self.value_width] * (1 + self.gated) + [self.key_dim]
        return parts_of(self.in_projection, x, widths, ops.silu, self.rows(*ops.shape(x)[:2]))

    def rows(self, b, n):
        """See `parts_of`; None where the shape of x is as good as any."""
        return None

    def turn(self, heads, positions):
        """Rotates every head `[b, n, s]` by global positions."""
        cos, sin = turns(positions, self.key_dim)
        return {name: rotate(head, cos, sin) for name, head in heads.items()}

    def attend(self, heads, v, a=None, b=None, padding_mask=None, segment_ids=None, offset=0):
        """Heads `[b, n, s]` by name and values `[b, n, e]` -> `[b, n, e]`."""
        raise NotImplementedError

    def projection_flops(self) -> int:
        return 2 * self.width * (2 * self.expansion * self.width + self.key_dim + self.value_width)

    def activations(self) -> int:
        """Numbers kept per token for the backward pass, besides the attention weights: an estimate."""
        in_width = 2 * self.expansion * self.width + self.key_dim
        return 2 * self.width + 2 * in_width + 2 * len(self.head_names) * self.key_dim + 2 * self.value_width

    def extend(self, x, state, positions=None, valid=None, prepared=None):
        """The next tokens of each row; see `flash_tf.layers.mixers`."""
        check_streams(self, self.obstacle)
        *gate, v, z = self.project(x)
        positions = next_positions(state["position"], ops.shape(x)[1]) if positions is None else positions
        heads = self.next_heads(z, positions, prepared)
        attended, state = self.attend_next(heads, v, state, valid, prepared)
        return self.out_projection(gate[0] * attended if gate else attended), state

    def next_heads(self, z, positions, prepared):
        """The shared representation `[b, k, s]` of the next tokens -> heads by name."""
        return self.turn(self.offset_scale(z), positions)

    def stream_bias(self):
        """The weights of the bias as `call` sees them, in the compute dtype."""
        named = {} if self.bias is None else {"a": self.bias.a, "b": self.bias.b}
        return {name: ops.cast(weight, self.compute_dtype) for name, weight in named.items()}

    def attend_next(self, heads, v, state, valid, prepared):
        """Heads by name and values `[b, k, e]` of the next tokens -> `[b, k, e]`, and the state."""
        raise NotImplementedError
