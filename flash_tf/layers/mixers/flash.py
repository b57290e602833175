"""FLASH: a gated attention unit whose attention is mixed chunk attention."""

from typing import Any

import keras
import numpy as np
from keras import ops

from flash_tf.layers import gated_unit
from flash_tf.layers.fused import check_implementation, runs_fused
from flash_tf.layers.masking import zero_padding
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.positions import runtime_zero, token_positions
from flash_tf.layers.streaming import check_next, kept_dtype
from kernels_pallas import flash as fused
from kernels_xla.common.spec import State, Tensor
from kernels_xla.flash import decode
from kernels_xla.flash.attention import SPEC, mixed_chunk_attention
from kernels_xla.flash.first_to_all import check_first
from kernels_xla.mamba import convolution

PARTS = {
    "both": ("quad_q", "quad_k", "lin_q", "lin_k"),
    "local": ("quad_q", "quad_k"),
    "global": ("lin_q", "lin_k"),
}
ROTARY_HEADS = {"all": PARTS["both"], "local": PARTS["local"], "none": ()}
NO_INTRA_CHUNK = (False, "normalized", False, "none")  # what `parts="global"` needs of the intra-chunk options


@MIXERS.register("flash")
@keras.saving.register_keras_serializable("flash_tf")
class MixedChunkAttention(gated_unit.ChunkedUnit):
    """The FLASH layer: quadratic attention inside chunks, linear attention across them, one gate.

    Source: FLASH (arXiv:2202.10447), section 3.2 and Code 1; see `kernels_xla.flash.attention` for the formula.

    Args:
      chunk_size: Tokens per chunk, c. Part of the function: 256 in the paper, 512 for PG-19, 64 for FLASH (GlobalOnly).
      causal: Whether position i may read only positions <= i.
      key_dim: Width s of the shared representation z, even.
      expansion: e / d, the width of gate and values over the model's.
      gated: Whether there is a gate; without it the values are 2e wide.
      relative_bias: Whether scores inside chunks get a learned Toeplitz bias, 256 parameters.
      scale: "normalized", or "paper_appendix" for relu(q k / c + bias)^2.
      parts: "both"; "local" for intra-chunk attention only, FLASH (LocalOnly); or "global" for inter-chunk attention
        only, FLASH (GlobalOnly), which takes no relative bias, scale or overlap. The unused part has no heads, bias or
        state. A causal "global" token cannot attend to its own chunk. Its content enters through the gate only, and
        tokens of the first chunk attend to nothing.
      overlapping: Whether intra-chunk attention also reads the previous chunk, causal or not, with a divisor of 2c
        [our definition: section 3.2.1 of the paper mentions the variant and gives no formula].
      first_to_all: "chunks": the first token of each chunk attends to all tokens of its document by softmax instead.
        "cls": only `[CLS]` does; in packed rows, the first token of each document that starts on a chunk boundary. The
        paper describes it in section 4.3; the formula is ours, see the kernel. It must be "none" if `causal`.
      chunk_divisor: Whether the second sum is divided by c, and not by its number of tokens.
      t5_bias: Whether the relative bias is T5's, 32 numbers for distances, and not two vectors.
      rotary_dim: Channels of a head that are rotated: the first of each half. None for all.
      token_shift: Whether the first half of the channels comes from the token before. These four options and the scale
        "paper_appendix" are lucidrains' FLASH-pytorch.
      rotary_heads: Heads that are rotated: "all"; "local", quad_q and quad_k of intra-chunk attention; or "none".
      bias_start: How the bias starts: "normal", as in the paper, or "symmetric"; see `RelativeBias`. With the scale
        "paper_appendix", models with the second learnt sooner (docs/claims.md).
      use_bias: Whether projections and heads have biases.
      implementation: How a training step computes attention and gate: "xla", as einsums; "pallas", by fused kernels on
        an NVIDIA GPU from Hopper on; or "auto", by fused kernels where they run and were measured to be faster. They
        need parts "both", a gate, no overlap and no first-to-all attention. The function and the weights are the same.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`, any n.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is neither read nor counted. A packed document gives the same output as alone if it starts on a
    multiple of `chunk_size`.

    Example:
      >>> from keras import ops
      >>> MixedChunkAttention(chunk_size=4, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    spec = SPEC
    decoding = decode

    def __init__(
        self,
        chunk_size: int = 256,
        causal: bool = False,
        key_dim: int = 128,
        expansion: int = 2,
        gated: bool = True,
        relative_bias: bool = True,
        scale: str = "normalized",
        parts: str = "both",
        overlapping: bool = False,
        first_to_all: str = "none",
        chunk_divisor: bool = False,
        t5_bias: bool = False,
        rotary_dim: int | None = None,
        token_shift: bool = False,
        rotary_heads: str = "all",
        bias_start: str = "normal",
        use_bias: bool = True,
        implementation: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.chunk_size, self.causal, self.key_dim, self.expansion = chunk_size, causal, key_dim, expansion
        self.gated, self.relative_bias, self.scale = gated, relative_bias, scale
        self.parts, self.overlapping, self.first_to_all = parts, overlapping, first_to_all
        self.chunk_divisor, self.t5_bias, self.rotary_dim = chunk_divisor, t5_bias, rotary_dim
        self.token_shift, self.rotary_heads, self.use_bias = token_shift, rotary_heads, use_bias
        self.bias_start, self.implementation = bias_start, implementation
        gated_unit.check(self)
        check_first("MixedChunkAttention", first_to_all, causal)
        if parts not in PARTS:
            raise ValueError(f"MixedChunkAttention: parts must be one of {', '.join(PARTS)}, got {parts!r}")
        if parts == "global" and (given := (relative_bias, scale, overlapping, first_to_all)) != NO_INTRA_CHUNK:
            names = "relative_bias, scale, overlapping, first_to_all"
            raise ValueError(f"MixedChunkAttention: parts 'global' needs {names} = {NO_INTRA_CHUNK}, got {given}")
        self._check_variants()
        self._check_rotary()

    def _check_variants(self):
        check_implementation(self)
        if self.implementation == "pallas" and (given := self._einsums_alone()) is not None:
            raise ValueError(f"MixedChunkAttention: implementation 'pallas' needs {given}")
        if self.t5_bias and not self.relative_bias:
            raise ValueError("MixedChunkAttention: t5_bias needs relative_bias true, got False")
        if self.chunk_divisor and self.parts == "local":
            raise ValueError("MixedChunkAttention: chunk_divisor needs parts 'both' or 'global', got 'local'")

    def _check_rotary(self):
        if self.rotary_heads not in ROTARY_HEADS:
            needed = f"rotary_heads must be one of {', '.join(ROTARY_HEADS)}"
            raise ValueError(f"MixedChunkAttention: {needed}, got {self.rotary_heads!r}")
        if self.rotary_heads == "local" and self.parts != "both":
            raise ValueError(f"MixedChunkAttention: rotary_heads 'local' needs parts 'both', got {self.parts!r}")
        if self.rotary_heads == "none" and self.rotary_dim is not None:
            raise ValueError("MixedChunkAttention: rotary_dim needs rotary_heads 'all' or 'local', got 'none'")
        if (turned := self.rotary_dim) is not None and (turned % 2 or not 2 <= turned <= self.key_dim):
            needed = f"an even rotary_dim from 2 to key_dim, {self.key_dim}"
            raise ValueError(f"MixedChunkAttention needs {needed}, got {turned}")

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
        if self.token_shift:
            masked = {"padding_mask": padding_mask, "segment_ids": segment_ids}
            x = self._shifted(x, convolution.convolution(self._first_half(x), *self._taps(x), **masked))
        positions = token_positions(x, segment_ids, positions)
        if training and self._runs_fused(tuple(x.shape[:2]), x.dtype, segment_ids is not None, positions):
            return self._fused(x, positions, padding_mask=padding_mask, segment_ids=segment_ids)
        u, v, z = gated_unit.project(self, x, gated_unit.chunked_shapes(self, x))
        heads = gated_unit.rotated(self, self.offset_scale(z), positions)
        attended = mixed_chunk_attention(
            **heads,
            v=v,
            **gated_unit.bias(self),
            **self.case,
            padding_mask=padding_mask,
            segment_ids=segment_ids,
            offset=runtime_zero(positions),
        )
        return gated_unit.leave(self, u, attended)

    def check_training(self, b: int, n: int) -> None:
        """Raises a ValueError if a training step over `[b, n]` tokens must run fused kernels, and cannot here."""
        self._runs_fused((b, n), self.compute_dtype, packed=False, positions=np.zeros((1, n)))

    def _runs_fused(self, lead, dtype, packed, positions):
        """Whether the fused kernels compute a step over tokens `lead`; a ValueError if they must and cannot."""
        if self.implementation == "auto" and self._einsums_alone() is not None:
            return False
        shape = (*lead, 2 * self.value_width + self.key_dim)
        angled = gated_unit.angled(positions, lead[0])
        options = (self.value_width, self.chunk_size, self.causal, packed, self._turned, angled)
        return runs_fused(self, lead, fused, lambda: fused.sizes(shape, dtype, *options))

    def _einsums_alone(self):
        """The options that the fused kernels need instead, or None."""
        needed = {"parts": "both", "gated": True, "overlapping": False, "first_to_all": "none"}
        given = {name: getattr(self, name) for name in needed}
        return None if given == needed else f"{needed}, got {given}"

    def _fused(self, x, positions, **masks):
        gated = fused.gated_mixed_chunk_attention(
            **gated_unit.projected(self, x, positions),
            **gated_unit.bias(self),
            turned=self._turned,
            value_width=self.value_width,
            chunk_size=self.chunk_size,
            causal=self.causal,
            scale=self.scale,
            chunk_divisor=self.chunk_divisor,
            offset=runtime_zero(positions),
            **masks,
        )
        return self.out_projection(gated)

    def extend(
        self,
        x: Tensor,
        state: State,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
        precomputed: dict | None = None,
    ) -> tuple[Tensor, State]:
        """The next tokens of each row; see `flash_tf.layers.mixers`."""
        if not self.token_shift:
            return super().extend(x, state, positions, valid, precomputed)
        valid = check_next(self, self.obstacle, x, state, valid)
        rest, kept = self._apart(state)
        before, after = convolution.extend({"tokens": kept}, self._first_half(x), *self._taps(x), valid=valid)
        x = self._shifted(x, before)
        out, rest = super().extend(x, rest, positions, valid, precomputed)
        return out, {**rest, "shift": after["tokens"]}

    def _first_half(self, x):
        return x[..., : -(-self.width // 2)]

    def _shifted(self, x, before):
        """The first half of the channels from the token before, and the others."""
        return ops.concatenate([before, x[..., before.shape[-1] :]], axis=-1)

    def _taps(self, x):
        """Weights and bias of a convolution that gives the token before."""
        half = -(-self.width // 2)
        before, own = ops.ones((1, half), x.dtype), ops.zeros((1, half), x.dtype)
        return ops.concatenate([before, own], axis=0), ops.zeros((half,), x.dtype)

    def _apart(self, state):
        return {name: x for name, x in state.items() if name != "shift"}, state.get("shift")

    def initial_state(self, batch: int, capacity: int | None = None, dtype: str | None = None) -> State:
        """As `KernelMixer.initial_state`; with `token_shift` also half of the last token, `shift [b, 1, d / 2]`."""
        state = super().initial_state(batch, capacity, dtype)
        if self.token_shift:
            state["shift"] = ops.zeros((batch, 1, -(-self.width // 2)), kept_dtype(self, dtype))
        return state

    def state_bytes(self, n: int, itemsize: int = 2) -> int | None:
        found = super().state_bytes(n, itemsize)
        return found if found is None or not self.token_shift else found + itemsize * -(-self.width // 2)

    def flush(self, states: list[State]) -> list[State]:
        if not self.token_shift:
            return super().flush(states)
        rest, kept = zip(*map(self._apart, states), strict=True)
        closed = super().flush(list(rest))
        return [{**state, "shift": shift} for state, shift in zip(closed, kept, strict=True)]

    @property
    def head_names(self) -> tuple[str, ...]:
        return PARTS[self.parts]

    @property
    def rotated_head_names(self) -> tuple[str, ...]:
        return tuple(name for name in ROTARY_HEADS[self.rotary_heads] if name in self.head_names)

    @property
    def _turned(self):
        return tuple(name in self.rotated_head_names for name in self.head_names)

    @property
    def case(self) -> dict[str, Any]:
        absent = set(PARTS["both"]) - set(PARTS[self.parts])
        options = {"chunk_size": self.chunk_size, "causal": self.causal, "scale": self.scale}
        options |= {} if self.causal else {"first_to_all": self.first_to_all}  # which no stream takes
        options |= {"chunk_divisor": True} if self.chunk_divisor else {}
        return {**options, "overlapping": self.overlapping, **{name: None for name in absent}}

    def activations(self, n: int) -> int:
        c = self.chunk_size
        weights = 0 if self.parts == "global" else min(n, c * (2 if self.overlapping else 1))
        weights += n / c if self.first_to_all == "chunks" else 0
        sums = 0 if self.parts == "local" else 4 * self.key_dim * self.value_width / c  # in float32, of each chunk
        return gated_unit.activations(self) + round(2 * weights + sums)
