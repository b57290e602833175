"""BigBird: each block attends to its neighbours, to both ends of the text, and to random blocks."""

import keras

from flash_tf.layers.bidirectional_mixer import BidirectionalMixer
from flash_tf.layers.mixers import MIXERS
from kernels_xla.bigbird import SPEC
from kernels_xla.common.spec import KernelSpec


@MIXERS.register("bigbird")
@keras.saving.register_keras_serializable("flash_tf")
class BigBird(BidirectionalMixer):
    """`out = W_o concat_h(attend(q_h, k_h, v_h))` over the blocks that a block sees.

    Source: Zaheer et al., "Big Bird", arXiv:2007.14062; see `kernels_xla.bigbird`. The seed and the
    number of blocks determine the random blocks [our definition].

    Args:
      heads: h; must divide the width d. None for 12, or fewer if 12 do not divide it.
      causal: Must be false: the layer reads the whole text.
      chunk_size: Tokens of a block. Part of the function.
      random_blocks: Number of random blocks for each block.
      seed: Seed of the random blocks.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Must be None: a row is one text.
      positions: Ignored: the layer has no position embedding.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read. The last block is the block of the last real token.

    Example:
      >>> from keras import ops
      >>> BigBird(heads=2, chunk_size=4)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    kernel_options = ("chunk_size", "random_blocks", "seed")

    def __init__(
        self,
        heads: int | None = None,
        causal: bool = False,
        chunk_size: int = 64,
        random_blocks: int = 3,
        seed: int = 0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.set_options(causal, seed, heads=heads, chunk_size=chunk_size, random_blocks=random_blocks)

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    def seen(self, n: int) -> int:
        return (5 + self.random_blocks) * self.chunk_size
