"""Transformer-LS: attention to a window of tokens and to a dynamic low-rank projection of the text."""

import keras
from keras import ops

from flash_tf.layers.bidirectional_mixer import BidirectionalMixer
from flash_tf.layers.common import parts_of, projection
from flash_tf.layers.mixers import MIXERS
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.transformer_ls import attention, causal_attention
from kernels_xla.transformer_ls.attention import EPSILON


@MIXERS.register("transformer_ls")
@keras.saving.register_keras_serializable("flash_tf")
class TransformerLS(BidirectionalMixer):
    """`out = W_o concat_h(attend(q_h, [near k_h, far K_h], [near v_h, far V_h]))`, one softmax over both.

    Source: Zhu et al., "Long-Short Transformer", arXiv:2107.02192. One layer norm acts on keys and values, and another
    on their weighted sums, as in the authors' code for masked models. See `kernels_xla.transformer_ls.attention`. The
    causal form, `kernels_xla.transformer_ls.causal_attention`, sums each segment once it is finished. Its state keeps
    the sums of all segments. Our causal form differs from the authors' code: it has the same norms as the masked form,
    no relative positions, and segments as long as the window's.

    Args:
      heads: h; must divide the width d. None for 12, or fewer if 12 do not divide it.
      causal: Whether position i may read only positions <= i.
      chunk_size: Tokens of a block, or of a segment. Part of the function. The window of a block, which must be even,
        is itself and half a block on each side. If causal, a token's window is its own segment and the one before.
      landmarks: r, the number of weighted sums of a head; if causal, for each segment.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document, if causal; else it must be None: a
        row is one text.
      positions: Ignored: the layer has no position embedding.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read and not part of a sum. A packed document gives the same output as alone if it starts on
    a multiple of `chunk_size`.

    Example:
      >>> TransformerLS(heads=2, chunk_size=4, causal=True)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    never_causal = False
    grows = True

    def __init__(
        self, heads: int | None = None, causal: bool = False, chunk_size: int = 64, landmarks: int = 32, **kwargs
    ):
        super().__init__(**kwargs)
        self.set_options(causal, heads=heads, chunk_size=chunk_size, landmarks=landmarks)
        if chunk_size % 2 and not causal:
            raise ValueError(f"TransformerLS needs an even chunk_size, got {chunk_size}")

    @property
    def align(self) -> int:
        """Documents must start at multiples of the segment."""
        return self.chunk_size if self.causal else 1

    def build(self, x_shape: tuple) -> None:
        self.build_heads(x_shape, multiple=1)
        # No bias: the softmax over tokens would cancel it.
        self.landmark_projection = projection(self, self.heads * self.landmarks, "landmark_projection", use_bias=False)
        same = {"epsilon": EPSILON, "dtype": self.dtype_policy}
        self.near_norm = keras.layers.LayerNormalization(name="near_norm", **same)
        self.far_norm = keras.layers.LayerNormalization(name="far_norm", **same)
        for layer in (self.landmark_projection, self.near_norm, self.far_norm):
            layer.build(x_shape)
        self.built = True

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        return {**super().sizes(b, n), "r": self.landmarks}

    def enter(self, x: Tensor, positions: Tensor | None) -> tuple[dict[str, Tensor], list[Tensor]]:
        q, k, v = parts_of(self.in_projection, x, [self.width] * 3)
        inputs = {"q": q, "k": self.near_norm(k), "v": self.near_norm(v), "scores": self.landmark_projection(x)}
        inputs = {name: self.split(part) for name, part in inputs.items()}
        shape = (self.heads, self.width // self.heads)
        norm = {"scale": self.far_norm.gamma, "offset": self.far_norm.beta}
        norm = {name: ops.reshape(weight, shape) for name, weight in norm.items()}
        return {**inputs, **{f"{of}_{name}": weight for of in "kv" for name, weight in norm.items()}}, []

    def projection_flops(self) -> int:
        return 8 * self.width**2 + 2 * self.width * self.heads * self.landmarks

    @property
    def kernel_options(self) -> tuple[str, ...]:
        return ("chunk_size", "causal") if self.causal else ("chunk_size",)

    @property
    def spec(self) -> KernelSpec:
        return causal_attention.SPEC if self.causal else attention.SPEC

    def seen(self, n: int) -> int:
        segments = n // self.chunk_size if self.causal else 1
        return 2 * self.chunk_size + (segments + 1) * self.landmarks  # once more to make the sums
