"""Skyformer: kernelized attention through random queries and keys."""

import keras

from flash_tf.layers.bidirectional_mixer import BidirectionalMixer
from flash_tf.layers.mixers import MIXERS
from kernels_xla.common.spec import KernelSpec
from kernels_xla.skyformer import SPEC


@MIXERS.register("skyformer")
@keras.saving.register_keras_serializable("flash_tf")
class Skyformer(BidirectionalMixer):
    """`out = W_o concat_h(K(q_h, S) (K(S, S) + 0.1)^-1 K(S, k_h) v_h)`, K being a Gaussian of the distance.

    Source: Chen et al., "Skyformer", arXiv:2111.00035; see `kernels_xla.skyformer`. Which queries and keys are
    in S follows from the seed and from the number of real tokens [our definition; the authors draw in each step].

    Args:
      heads: h; must divide the width d.
      causal: Must be false: it reads the whole text.
      landmarks: How many rows S has.
      seed: What its rows follow from.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens.
      segment_ids: Must be None: a row is one text.
      positions: Not read: it has no positions of its own.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read, and never in S.

    Example:
      >>> from keras import ops
      >>> Skyformer(heads=2)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    def __init__(self, heads: int = 12, causal: bool = False, landmarks: int = 128, seed: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.keep(causal, seed, heads=heads, landmarks=landmarks)

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    def seen(self, n: int) -> int:
        return 2 * self.landmarks
