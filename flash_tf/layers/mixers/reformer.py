"""Reformer: softmax attention among tokens with similar hashes."""

import keras

from flash_tf.layers.bidirectional_mixer import BidirectionalMixer
from flash_tf.layers.common import parts_of, projection
from flash_tf.layers.mixers import MIXERS
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.reformer import SPEC


@MIXERS.register("reformer")
@keras.saving.register_keras_serializable("flash_tf")
class Reformer(BidirectionalMixer):
    """`out = W_o concat_h(o_h)`: attention of q_h to `q_h / |q_h|` within chunks of the text sorted by hash.

    Source: Kitaev et al., "Reformer", arXiv:2001.04451, LSH attention, without its reversible layers; see
    `kernels_xla.reformer`. The seed determines the hash's rotations [our definition; the authors draw
    them in each step].

    Args:
      heads: h; must divide the width d. None for 12, or fewer if 12 do not divide it.
      causal: Must be false: the layer reads the whole text.
      chunk_size: Tokens of a chunk of the sorted text. Part of the function.
      buckets: Number of hash values; even.
      rounds: Number of hashes.
      seed: Seed of the rotations.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Must be None: a row is one text.
      positions: Ignored: the layer has no position embedding.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read; it is sorted behind the text.

    Example:
      >>> from keras import ops
      >>> Reformer(heads=2, chunk_size=4)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    chooses = True

    kernel_options = ("chunk_size", "buckets", "rounds", "seed")

    def __init__(
        self,
        heads: int | None = None,
        causal: bool = False,
        chunk_size: int = 64,
        buckets: int = 64,
        rounds: int = 2,
        seed: int = 0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.set_options(causal, seed, heads=heads, chunk_size=chunk_size, buckets=buckets, rounds=rounds)
        if buckets % 2:
            raise ValueError(f"Reformer needs an even number of buckets, got {buckets}")

    def build(self, x_shape: tuple) -> None:
        self.set_heads(x_shape)
        self.in_projection = projection(self, 2 * self.width, "in_projection")
        self.out_projection = projection(self, self.width, "out_projection")
        self.in_projection.build(x_shape)
        self.out_projection.build(x_shape)
        self.built = True

    def enter(self, x: Tensor, positions: Tensor | None) -> tuple[dict[str, Tensor], list[Tensor]]:
        q, v = (self.split(part) for part in parts_of(self.in_projection, x, [self.width] * 2))
        return {"q": q, "v": v}, []

    def projection_flops(self) -> int:
        return 6 * self.width**2

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    def seen(self, n: int) -> int:
        return 2 * self.rounds * self.chunk_size
