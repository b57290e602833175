"""FLASH: a gated attention unit whose attention is mixed chunk attention."""

import keras

from flash_tf.layers.chunked_unit import ChunkedUnit
from flash_tf.layers.mixers import MIXERS
from kernels_xla.flash import decode
from kernels_xla.flash.attention import SPEC
from kernels_xla.flash.first_to_all import check_first

PARTS = {
    "both": ("quad_q", "quad_k", "lin_q", "lin_k"),
    "local": ("quad_q", "quad_k"),
    "global": ("lin_q", "lin_k"),
}
NOT_INSIDE = (False, "normalized", False, "none")  # options of the attention inside chunks, where there is none


@MIXERS.register("mixed_chunk")
@keras.saving.register_keras_serializable("flash_tf")
class MixedChunkAttention(ChunkedUnit):
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

    spec, stream = SPEC, decode

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
    def head_names(self):
        return PARTS[self.parts]

    @property
    def case(self):
        absent = set(PARTS["both"]) - set(PARTS[self.parts])
        options = {"chunk_size": self.chunk_size, "causal": self.causal, "scale": self.scale}
        options |= {} if self.causal else {"first_to_all": self.first_to_all}  # which no stream takes
        return {**options, "overlapping": self.overlapping, **{name: None for name in absent}}

    def activations(self, n: int) -> int:
        c = self.chunk_size
        weights = 0 if self.parts == "global" else min(n, c * (2 if self.overlapping else 1))
        weights += n / c if self.first_to_all == "chunks" else 0
        sums = 0 if self.parts == "local" else 4 * self.key_dim * self.value_width / c  # in float32, of each chunk
        return super().activations() + round(2 * weights + sums)
