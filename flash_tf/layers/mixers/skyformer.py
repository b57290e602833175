"""Skyformer: kernelized attention through landmarks, a random sample of queries and keys."""

import keras

from flash_tf.layers.bidirectional_mixer import BidirectionalMixer
from flash_tf.layers.mixers import MIXERS
from kernels_xla.common.spec import KernelSpec
from kernels_xla.skyformer import SPEC


@MIXERS.register("skyformer")
@keras.saving.register_keras_serializable("flash_tf")
class Skyformer(BidirectionalMixer):
    """`out = W_o concat_h(K(q_h, S) (K(S, S) + 0.1)^-1 K(S, k_h) v_h)`, where K is a Gaussian of the distance.

    Source: Chen et al., "Skyformer", arXiv:2111.00035; see `kernels_xla.skyformer`. The seed and the
    number of real tokens determine the sample S [our definition; the authors draw it in each step].

    Args:
      heads: h; must divide the width d. None for 12, or fewer if 12 do not divide it.
      causal: Must be false: the layer reads the whole text.
      landmarks: Number of rows of S.
      seed: Seed of the sample.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Must be None: a row is one text.
      positions: Ignored: the layer has no position embedding.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read and never part of S.

    Example:
      >>> from keras import ops
      >>> Skyformer(heads=2)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    kernel_options = ("landmarks", "seed")

    def __init__(self, heads: int | None = None, causal: bool = False, landmarks: int = 128, seed: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.set_options(causal, seed, heads=heads, landmarks=landmarks)

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    def seen(self, n: int) -> int:
        return 2 * self.landmarks
