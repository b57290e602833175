"""The parts of a gated attention unit: in-projection, heads, bias, gate, out-projection, and decoding in chunks.

Source: FLASH (arXiv:2202.10447), section 2.2, Figure 2. FLASH, its variant with weighted chunks and GAU put these parts
around their own attention: `out = W_o (u * attend(heads(z), v))` with `u, v, z = silu(W_i x)`.

A unit is a layer with `head_names` and these options as attributes: `key_dim`, the width s of z; `expansion`, e / d;
`gated`, whether u exists; `relative_bias`, `bias_start` and `scale`.
"""

from types import ModuleType

import numpy as np
from keras import ops

from flash_tf.layers.common import parts_of, projection, width_of
from flash_tf.layers.kernel_mixer import KernelMixer
from flash_tf.layers.offset_scale import OffsetScale
from flash_tf.layers.relative_bias import STARTS, RelativeBias
from flash_tf.layers.streaming import check_next, next_positions
from flash_tf.layers.t5_bias import T5Bias
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.rotary import rope_tables, rotate
from kernels_xla.common.spec import State, Tensor
from kernels_xla.flash import decode


def check(unit: KernelMixer) -> None:
    """Raises a ValueError if an option of the unit cannot be used."""
    name = type(unit).__name__
    if unit.key_dim < 2 or unit.key_dim % 2:
        raise ValueError(f"{name} needs an even key_dim of at least 2, for rotary pairs, got {unit.key_dim}")
    if unit.expansion < 1:
        raise ValueError(f"{name} needs expansion >= 1, got {unit.expansion}")
    if unit.scale not in ("normalized", "paper_appendix"):
        raise ValueError(f"{name}: scale must be 'normalized' or 'paper_appendix', got {unit.scale!r}")
    if unit.bias_start not in STARTS:
        raise ValueError(f"{name}: bias_start must be one of {', '.join(STARTS)}, got {unit.bias_start!r}")
    t5 = getattr(unit, "t5_bias", False)
    if unit.bias_start != "normal" and (t5 or not unit.relative_bias):
        given = f"relative_bias {unit.relative_bias}, t5_bias {t5}"
        raise ValueError(f"{name}: bias_start {unit.bias_start!r} needs relative_bias True, t5_bias False, got {given}")
    if getattr(unit, "chunk_size", 1) < 1:
        raise ValueError(f"{name} needs chunk_size >= 1, got {unit.chunk_size}")


def build(unit: KernelMixer, x_shape: tuple) -> None:
    """Gives the unit its weights: one dense in-projection `[d, 2e + s]`, scales and offsets, bias, out-projection."""
    unit.width = width_of(unit, x_shape)
    # Without the gate, v takes its place too and is 2e wide ("no gating" in Table 1 of the paper).
    unit.value_width = unit.expansion * unit.width * (1 if unit.gated else 2)
    # The paper's N(0, 0.02) scales leave the attention alive only under the paper's scale with a bias.
    start = "normal" if unit.scale == "paper_appendix" and unit.relative_bias else "ones"
    use_bias = getattr(unit, "use_bias", True)
    unit.in_projection = projection(unit, 2 * unit.expansion * unit.width + unit.key_dim, "in_projection", use_bias)
    unit.out_projection = projection(unit, unit.width, "out_projection", use_bias)
    unit.offset_scale = OffsetScale(unit.head_names, start, use_bias, dtype=unit.dtype_policy, name="offset_scale")
    unit.bias = _bias_layer(unit) if unit.relative_bias else None

    unit.in_projection.build(x_shape)
    unit.out_projection.build((*x_shape[:-1], unit.value_width))
    unit.offset_scale.build((*x_shape[:-1], unit.key_dim))
    if unit.bias is not None:
        unit.bias.build()
    unit.built = True


def _bias_layer(unit):
    same = {"dtype": unit.dtype_policy, "name": "relative_bias"}
    if not getattr(unit, "t5_bias", False):
        return RelativeBias(start=unit.bias_start, **same)
    window = unit.chunk_size * (2 if unit.overlapping else 1)
    return T5Bias(window, unit.causal, unit.key_dim**0.5, **same)


def project(unit: KernelMixer, x: Tensor, shapes: list | None = None) -> tuple[Tensor | None, Tensor, Tensor]:
    """`[b, n, d]` -> u or None, v `[b, n, e]` and z `[b, n, s]`, of `silu(W_i x)`; `shapes` goes to `parts_of`."""
    widths = [unit.value_width] * (1 + unit.gated) + [unit.key_dim]
    *u, v, z = parts_of(unit.in_projection, x, widths, ops.silu, shapes)
    return u[0] if u else None, v, z


def rotated(unit: "ChunkedUnit", heads: dict[str, Tensor], positions: Tensor) -> dict[str, Tensor]:
    """Rotates the unit's `rotated_head_names` among the heads `[b, n, s]` by global positions."""
    cos, sin = tables(unit, positions, next(iter(heads.values())))
    turned = unit.rotated_head_names
    return {name: rotate(head, cos, sin) if name in turned else head for name, head in heads.items()}


def tables(unit: KernelMixer, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines that rotate the unit's heads, in the dtype of sums of `x`; see `rope_tables`."""
    return rope_tables(positions, unit.key_dim, sum_dtype(x), turning=getattr(unit, "rotary_dim", None))


def projected(unit: KernelMixer, x: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """What fused kernels take from the in-projection of x `[b, n, d]` to the heads, by the names of their arguments."""
    kernel = ops.cast(unit.in_projection.kernel, x.dtype)
    given = ops.cast(unit.in_projection.bias, x.dtype) if unit.use_bias else ops.zeros(kernel.shape[1:], x.dtype)
    gammas, betas = unit.offset_scale.stacked(x.dtype)
    shape = (angled(positions, x.shape[0]), x.shape[1], unit.key_dim // 2)
    cos, sin = (ops.broadcast_to(one, shape) for one in tables(unit, positions, x))
    return {"p": ops.matmul(x, kernel), "bias": given, "gammas": gammas, "betas": betas, "cos": cos, "sin": sin}


def angled(positions: Tensor, b: int) -> int:
    """The number of rows that have positions of their own: 1 if they are known to share them, else b."""
    return 1 if np.shape(positions)[0] == 1 else b


def bias(unit: KernelMixer) -> dict[str, Tensor]:
    """The relative bias in the compute dtype, by the kernel's names; empty without one."""
    if isinstance(unit.bias, T5Bias):
        return {"a": ops.cast(unit.bias.by_distance(), unit.compute_dtype), "b": None}
    vectors = {} if unit.bias is None else {"a": unit.bias.a, "b": unit.bias.b}
    return {name: ops.cast(vector, unit.compute_dtype) for name, vector in vectors.items()}


def leave(unit: KernelMixer, gate: Tensor | None, attended: Tensor) -> Tensor:
    """`W_o (u * attended)`: `[b, n, e]` -> `[b, n, d]`."""
    return unit.out_projection(attended if gate is None else gate * attended)


def projection_flops(unit: KernelMixer) -> int:
    """FLOPs of the products with weights for one token."""
    return 2 * unit.width * (2 * unit.expansion * unit.width + unit.key_dim + unit.value_width)


def activations(unit: KernelMixer) -> int:
    """Numbers kept per token for the backward pass, without the attention weights: an estimate."""
    in_width = 2 * unit.expansion * unit.width + unit.key_dim
    return 2 * unit.width + 2 * in_width + 2 * len(unit.head_names) * unit.key_dim + 2 * unit.value_width


def chunked_shapes(unit: KernelMixer, x: Tensor) -> list:
    """The shapes in which a TPU activates u, v and z: v in chunks, where chunks divide the row; see `parts_of`."""
    b, n = ops.shape(x)[:2]
    whole = isinstance(n, int) and n % unit.chunk_size == 0
    row = (-1,) if isinstance(b, int) and b == 1 else (b, n)  # XLA drops the axis of a single row
    return [row] * unit.gated + [(b, -1, unit.chunk_size) if whole else (b, n), row]


class ChunkedUnit(KernelMixer):
    """A unit with chunks, without its attention: what FLASH and its variant with weighted chunks share.

    A subclass has `call` and `decoding`, the module of its kernel with `extend`, `step` and `flush`.
    """

    gated_unit = True
    decoding: ModuleType

    def build(self, x_shape: tuple) -> None:
        build(self, x_shape)

    @property
    def align(self) -> int:
        """Documents must start at multiples of the chunk."""
        return self.chunk_size

    @property
    def rotated_head_names(self) -> tuple[str, ...]:
        """Names of the heads that are rotated."""
        return self.head_names

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        return {"b": b, "n": n, "s": self.key_dim, "e": self.value_width}

    def projection_flops(self) -> int:
        return projection_flops(self)

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
        gate, v, z = project(self, x, chunked_shapes(self, x))
        positions = next_positions(state["position"], ops.shape(x)[1]) if positions is None else positions
        if precomputed is None:
            heads = rotated(self, self.offset_scale(z), positions)
            attended, state = self.decoding.extend(state, **heads, v=v, **bias(self), valid=valid, **self.case)
        else:
            cos, sin = (ops.expand_dims(x, 2) for x in tables(self, positions, z))
            heads = z[:, :, None] * precomputed["scales"] + precomputed["offsets"]  # [b, 1, h, s]
            turned = ops.convert_to_tensor([[name in self.rotated_head_names] for name in self.head_names])
            heads = ops.where(turned, rotate(heads, cos, sin), heads)
            case = {"chunk_size": self.chunk_size, "scale": self.scale}
            case |= {"chunk_divisor": True} if getattr(self, "chunk_divisor", False) else {}
            out, state = self.decoding.step(state, heads[:, 0], v[:, 0], precomputed.get("bias"), valid=valid, **case)
            attended = out[:, None]
        return leave(self, gate, attended), state

    def precompute(self, state: State) -> dict:
        """What a loop over single tokens makes once: stacked scales and offsets, and the bias by distance."""
        made = dict(zip(("scales", "offsets"), self.offset_scale.stacked(self.compute_dtype), strict=True))
        if "quad_q" not in self.head_names:
            return made
        vectors = bias(self) or {"a": None, "b": None}
        case = {"chunk_size": self.chunk_size, "scale": self.scale}
        return {**made, "bias": decode.precompute(state, **vectors, **case)}

    def flush(self, states: list[State]) -> list[State]:
        return self.decoding.flush(states, self.chunk_size)
