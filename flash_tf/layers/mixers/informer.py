"""Informer: softmax attention for the queries with the least uniform scores."""

import keras

from flash_tf.layers.bidirectional_mixer import BidirectionalMixer
from flash_tf.layers.mixers import MIXERS
from kernels_xla.common.spec import KernelSpec
from kernels_xla.informer import SPEC


@MIXERS.register("informer")
@keras.saving.register_keras_serializable("flash_tf")
class Informer(BidirectionalMixer):
    """`out = W_o concat_h(o_h)`: o_h is softmax attention for some tokens, and the mean of v_h for the others.

    Source: Zhou et al., "Informer", arXiv:2012.07436, ProbSparse self-attention; see `kernels_xla.informer`. The
    number of attending tokens is fixed, where the paper lets it grow with the logarithm of the length, and all queries
    share one sample of keys [our definitions].

    Args:
      heads: h; must divide the width d. None for 12, or fewer if 12 do not divide it.
      causal: Must be false: the layer reads the whole text.
      queries: How many tokens attend, and how many keys are sampled to find them.
      seed: Seed of the sample.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Must be None: a row is one text.
      positions: Ignored: the layer has no position embedding.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not sampled, not chosen, and not part of the mean.

    Example:
      >>> from keras import ops
      >>> Informer(heads=2)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    chooses = True

    kernel_options = ("queries", "seed")

    def __init__(self, heads: int | None = None, causal: bool = False, queries: int = 128, seed: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.set_options(causal, seed, heads=heads, queries=queries)

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    def seen(self, n: int) -> int:
        return 2 * self.queries
