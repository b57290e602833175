"""Kernelized attention: a Gaussian of the distance between query and key."""

import keras

from flash_tf.layers.bidirectional_mixer import BidirectionalMixer
from flash_tf.layers.mixers import MIXERS
from kernels_xla.common.spec import KernelSpec
from kernels_xla.kernelized_attention import SPEC


@MIXERS.register("kernelized_attention")
@keras.saving.register_keras_serializable("flash_tf")
class KernelizedAttention(BidirectionalMixer):
    """`out = W_o concat_h(sum_j exp(-|q_h - k_hj|^2 / (2 sqrt(s))) v_hj)`. The weights are not normalized.

    Source: Skyformer (arXiv:2111.00035), section 3; see `kernels_xla.kernelized_attention`.

    Args:
      heads: h; must divide the width d. None for 12, or fewer if 12 do not divide it.
      causal: Must be false: the layer reads the whole text.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Ignored: the layer has no position embedding.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read; a packed document gives the same output as alone.

    Example:
      >>> from keras import ops
      >>> KernelizedAttention(heads=2)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    packs = True

    def __init__(self, heads: int | None = None, causal: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.set_options(causal, heads=heads)

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    def seen(self, n: int) -> int:
        return n
