"""Nystromformer: softmax attention through landmarks, the means of segments."""

import keras

from flash_tf.layers.bidirectional_mixer import BidirectionalMixer
from flash_tf.layers.mixers import MIXERS
from kernels_xla.common.spec import KernelSpec
from kernels_xla.nystromformer import SPEC


@MIXERS.register("nystromformer")
@keras.saving.register_keras_serializable("flash_tf")
class Nystromformer(BidirectionalMixer):
    """`out = W_o concat_h(F1 pinv(F2) F3 v_h)`: tokens to landmarks, landmarks to landmarks, landmarks to tokens.

    Source: Xiong et al., "Nystromformer", arXiv:2102.03902, without its convolution of the values, as in
    Skyformer's comparison (arXiv:2111.00035); see `kernels_xla.nystromformer`.

    Args:
      heads: h; must divide the width d. None for 12, or fewer if 12 do not divide it.
      causal: Must be false: the layer reads the whole text.
      landmarks: Number of segments. Their lengths differ by one token at most.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Must be None: a row is one text.
      positions: Ignored: the layer has no position embedding.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: segments and means contain real tokens only.

    Example:
      >>> from keras import ops
      >>> Nystromformer(heads=2)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    kernel_options = ("landmarks",)

    def __init__(self, heads: int | None = None, causal: bool = False, landmarks: int = 128, **kwargs):
        super().__init__(**kwargs)
        self.set_options(causal, heads=heads, landmarks=landmarks)

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    def seen(self, n: int) -> int:
        return 2 * self.landmarks
