"""FLASH: a gated attention unit whose attention is mixed chunk attention."""

import keras
from keras import ops

from flash_tf.layers.gated_attention_unit import GatedAttentionUnit
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.streaming import check_capacity, check_streams
from kernels_xla import mixed_chunk_stream
from kernels_xla.mixed_chunk import SPEC, mixed_chunk_attention
from kernels_xla.mixed_chunk_first import check_first
from kernels_xla.rotary import rotate, turns

PARTS = {  # and what the kernel calls the heads of each
    "both": {"quad_q": "q_quad", "quad_k": "k_quad", "lin_q": "q_lin", "lin_k": "k_lin"},
    "local": {"quad_q": "q_quad", "quad_k": "k_quad"},
    "global": {"lin_q": "q_lin", "lin_k": "k_lin"},
}
NOT_INSIDE = (False, "normalized", False, "none")  # options of the attention inside chunks, where there is none


@MIXERS.register("mixed_chunk")
@keras.saving.register_keras_serializable("flash_tf")
class MixedChunkAttention(GatedAttentionUnit):
    """The FLASH layer: quadratic attention inside chunks, linear attention across them, one gate.

    Source: FLASH (arXiv:2202.10447), section 3.2 and Code 1; see `kernels_xla.mixed_chunk` for the formula.

    Args:
      chunk_size: Tokens per chunk, c. Part of the function: 256 in the paper, 512 for PG-19, 64 for FLASH (GlobalOnly).
      causal: Whether position i may read only positions <= i.
      key_dim: Width s of the shared representation z, even.
      expansion: e / d, the width of gate and values over the model's.
      gated: Whether there is a gate; without it the values are 2e wide.
      relative_bias: Whether scores inside chunks get a learned Toeplitz bias, 256 parameters.
      scale: "normalized", or "paper_appendix" for relu(q k / c + bias)^2.
      parts: "both"; "local", the attention inside chunks alone, FLASH (LocalOnly); or "global", that across chunks
        alone, FLASH (GlobalOnly), which takes no relative bias, scale or overlap. Heads, bias and state of the other
        part do not exist. A token of a causal "global" sees nothing of its own chunk, not even itself: what it is
        comes through the gate, and in the first chunk there is nothing to gate.
      overlapping: Whether attention inside chunks takes the chunk before too, causal or not, with a divisor of 2c [our
        definition: section 3.2.1 of the paper speaks of such a variant and gives no formula].
      first_to_all: "chunks": the first token of each chunk attends all tokens of its document by softmax instead.
        "cls": so does the first of the text alone, [CLS], or if packed that of each document that starts on a multiple
        of `chunk_size`. Section 4.3 of the paper in words, the formula is ours; see the kernel. Not if `causal`.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`, any n.
      padding_mask: Bool `[b, n]`, True at real tokens.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is neither read nor counted. Packed documents must start on a multiple of `chunk_size` to get what
    they get alone.

    Example:
      >>> from keras import ops
      >>> MixedChunkAttention(chunk_size=4, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    grows = False

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
        **kwargs,
    ):
        super().__init__(**kwargs)
        if chunk_size < 1:
            raise ValueError(f"MixedChunkAttention needs chunk_size >= 1, got {chunk_size}")
        self.chunk_size, self.causal, self.key_dim, self.expansion = chunk_size, causal, key_dim, expansion
        self.gated, self.relative_bias, self.scale = gated, relative_bias, scale
        self.parts, self.overlapping, self.first_to_all = parts, overlapping, first_to_all
        self._check()
        check_first("MixedChunkAttention", first_to_all, causal)
        if parts not in PARTS:
            raise ValueError(f"MixedChunkAttention: parts must be one of {', '.join(PARTS)}, got {parts!r}")
        if parts == "global" and (given := (relative_bias, scale, overlapping, first_to_all)) != NOT_INSIDE:
            names = "relative_bias, scale, overlapping, first_to_all"
            raise ValueError(f"MixedChunkAttention: parts 'global' needs {names} = {NOT_INSIDE}, got {given}")

    @property
    def align(self) -> int:
        """Documents must start at multiples of the chunk."""
        return self.chunk_size

    @property
    def head_names(self):
        return tuple(PARTS[self.parts])

    @property
    def _case(self):
        absent = PARTS["both"].keys() - PARTS[self.parts].keys()
        options = {"chunk_size": self.chunk_size, "causal": self.causal, "scale": self.scale}
        return {**options, "overlapping": self.overlapping, **{PARTS["both"][name]: None for name in absent}}

    def _named(self, heads):
        return {PARTS["both"][name]: head for name, head in heads.items()}

    def _sizes(self, b, n=None):
        return {"b": b, "n": n, "s": self.key_dim, "e": self.value_width}

    def attend(self, heads, v, a=None, b=None, padding_mask=None, segment_ids=None, offset=0):
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "offset": offset}
        options = {**self._case, "first_to_all": self.first_to_all}
        return mixed_chunk_attention(**self._named(heads), v=v, a=a, b=b, **options, **masks)

    def flops(self, n: int) -> int:
        case = {**self._case, "first_to_all": self.first_to_all}
        return self.projection_flops(n) + SPEC.flops(self._sizes(1, n), case)

    def state_bytes(self, n: int, itemsize: int = 2) -> int | None:
        return None if self.obstacle else SPEC.state_bytes(self._sizes(1, n), self._case, itemsize)

    def activations(self, n: int) -> int:
        c = self.chunk_size
        weights = 0 if self.parts == "global" else min(n, c * (2 if self.overlapping else 1))
        weights += n / c if self.first_to_all == "chunks" else 0
        sums = 0 if self.parts == "local" else 4 * self.key_dim * self.value_width / c  # in float32, of each chunk
        return super().activations() + round(2 * weights + sums)

    @property
    def obstacle(self) -> str | None:
        """Why it cannot stream, or None."""
        return None if self.causal else "it reads later tokens, being not causal"

    def initial_state(self, batch, capacity=None, dtype=None):
        """Constant in the text's length, so that `capacity` must be None; see `kernels_xla.mixed_chunk_stream`."""
        check_streams(self, self.obstacle)
        check_capacity(self, capacity)
        return SPEC.stream.initial_state(self._sizes(batch), self._case, dtype or self.compute_dtype)

    def next_heads(self, z, positions, prepared):
        if prepared is None:
            return super().next_heads(z, positions, prepared)
        cos, sin = (ops.expand_dims(x, 2) for x in turns(positions, self.key_dim))
        return rotate(z[:, :, None] * prepared["scales"] + prepared["offsets"], cos, sin)  # [b, 1, h, s], all at once

    def attend_next(self, heads, v, state, valid, prepared):
        if prepared is None:
            given = {**self._named(heads), "v": v, **self.stream_bias()}
            return SPEC.stream.extend(state, **given, valid=valid, **self._case)
        case = {"chunk_size": self.chunk_size, "scale": self.scale}
        out, state = mixed_chunk_stream.step(state, heads[:, 0], v[:, 0], prepared.get("bias"), valid=valid, **case)
        return out[:, None], state

    def prepare(self, state):
        weights = {"scales": self.offset_scale.scales, "offsets": self.offset_scale.offsets}
        made = {k: ops.stack([ops.cast(w, self.compute_dtype) for w in of_heads]) for k, of_heads in weights.items()}
        if self.parts == "global":
            return made
        bias = self.stream_bias() or {"a": None, "b": None}
        case = {"chunk_size": self.chunk_size, "scale": self.scale}
        return {**made, "bias": mixed_chunk_stream.prepare(state, **bias, **case)}

    def close(self, states):
        return mixed_chunk_stream.close(states, self.chunk_size)
