"""FLASH with weighted chunks: the variant of the paper's Appendix A."""

from typing import Any

import keras

from flash_tf.layers import gated_unit
from flash_tf.layers.masking import zero_padding
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.positions import runtime_zero, token_positions
from kernels_xla.common.spec import Tensor
from kernels_xla.flash import weighted_decode
from kernels_xla.flash.weighted import SPEC, weighted_mixed_chunk_attention


@MIXERS.register("flash_weighted")
@keras.saving.register_keras_serializable("flash_tf")
class WeightedChunks(gated_unit.ChunkedUnit):
    """The FLASH layer with chunks weighed by scores: `A [g, h]`, a softmax over the chunks h that chunk g sees.

    Source: FLASH (arXiv:2202.10447), Appendix A. The paper describes the variant; the formula is our definition. Two
    more rotated heads of the shared representation, "sum_q" and "sum_k", are averaged over chunks and give the scores;
    see `kernels_xla.flash.weighted`. Intra-chunk attention is the same as in `MixedChunkAttention`. With scores of 0,
    the whole layer is the same. A causal text needs two finished chunks before the weights matter. The state keeps a
    matrix `[s, e]` for every finished chunk, so it grows with the text.

    Args:
      chunk_size: Tokens per chunk, c. Part of the function.
      causal: Whether position i may read only positions <= i.
      key_dim: Width s of the shared representation z, even.
      expansion: e / d, the width of gate and values over the model's.
      gated: Whether there is a gate; without it the values are 2e wide.
      relative_bias: Whether scores inside chunks get a learned Toeplitz bias, 256 parameters.
      scale: "normalized", or "paper_appendix" for relu(q k / c + bias)^2 inside chunks.
      bias_start: How the bias starts: "normal", as in the paper, or "symmetric"; see `RelativeBias`.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`, any n.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is neither read nor counted, in means and in sums. A packed document gives the same output as alone
    if it starts on a multiple of `chunk_size`.

    Example:
      >>> from keras import ops
      >>> WeightedChunks(chunk_size=4, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    grows = True
    spec = SPEC
    decoding = weighted_decode
    head_names = ("quad_q", "quad_k", "lin_q", "lin_k", "sum_q", "sum_k")

    def __init__(
        self,
        chunk_size: int = 256,
        causal: bool = False,
        key_dim: int = 128,
        expansion: int = 2,
        gated: bool = True,
        relative_bias: bool = True,
        scale: str = "normalized",
        bias_start: str = "normal",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.chunk_size, self.causal, self.key_dim, self.expansion = chunk_size, causal, key_dim, expansion
        self.gated, self.relative_bias, self.scale, self.bias_start = gated, relative_bias, scale, bias_start
        gated_unit.check(self)

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
        u, v, z = gated_unit.project(self, x, gated_unit.chunked_shapes(self, x))
        heads = gated_unit.rotated(self, self.offset_scale(z), positions)
        attended = weighted_mixed_chunk_attention(
            **heads,
            v=v,
            **gated_unit.bias(self),
            **self.case,
            padding_mask=padding_mask,
            segment_ids=segment_ids,
            offset=runtime_zero(positions),
        )
        return gated_unit.leave(self, u, attended)

    @property
    def case(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, "causal": self.causal, "scale": self.scale}

    def activations(self, n: int) -> int:
        c = self.chunk_size
        sums = 4 * self.key_dim * self.value_width / c  # for each chunk: its own sum and the weighted sum
        scores = 6 * n / c**2  # scores and weights of chunks in float32
        return gated_unit.activations(self) + round(2 * min(n, c) + sums + scores)
