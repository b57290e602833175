"""Linformer: softmax attention to a fixed number of projected keys and values."""

import keras
from keras import ops

from flash_tf.layers.bidirectional_mixer import BidirectionalMixer
from flash_tf.layers.common import normal
from flash_tf.layers.mixers import MIXERS
from kernels_xla.common.lengths import at_most
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.linformer import SPEC


@MIXERS.register("linformer")
@keras.saving.register_keras_serializable("flash_tf")
class Linformer(BidirectionalMixer):
    """`out = W_o concat_h(softmax(q_h (E_h k_h)^T / sqrt(s)) E_h v_h)`, with E learned for each position.

    Source: Wang et al., "Linformer", arXiv:2006.04768, with one matrix a head for keys and values, as in
    Skyformer's comparison (arXiv:2111.00035); see `kernels_xla.linformer`.

    Args:
      heads: h; must divide the width d. None for 12, or fewer if 12 do not divide it.
      causal: Must be false: the layer reads the whole text.
      rank: Rows of E: how many keys a token sees.
      max_length: Columns of E: the longest text. A shorter one takes the first.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      x: Float tensor `[b, n, d]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of `x`, if there is one.
      segment_ids: Must be None: a row is one text.
      positions: Ignored: the layer has no position embedding.

    Returns:
      Float tensor `[b, n, d]`.

    Masking: padding is not read; its keys and values are zeros.

    Example:
      >>> Linformer(heads=2)(ops.ones((2, 10, 16))).shape
      TensorShape([2, 10, 16])
    """

    def __init__(
        self, heads: int | None = None, causal: bool = False, rank: int = 128, max_length: int = 512, **kwargs
    ):
        super().__init__(**kwargs)
        self.set_options(causal, heads=heads, rank=rank, max_length=max_length)

    def build(self, x_shape: tuple) -> None:
        super().build(x_shape)
        shape = (self.heads, self.rank, self.max_length)
        self.mixing = self.add_weight(name="mixing", shape=shape, initializer=normal())

    @property
    def longest(self) -> int:
        """The most tokens of a text, `max_length`."""
        return self.max_length

    def sizes(self, b: int = 1, n: int | None = None) -> dict[str, int]:
        return {**super().sizes(b, n), "r": self.rank}

    def enter(self, x: Tensor, positions: Tensor | None) -> tuple[dict[str, Tensor], list[Tensor]]:
        x = at_most(x, self.max_length, "Linformer needs texts of at most max_length")
        inputs, rest = super().enter(x, positions)
        return {**inputs, "projection": ops.cast(self.mixing, self.compute_dtype)}, rest

    @property
    def spec(self) -> KernelSpec:
        return SPEC

    def seen(self, n: int) -> int:
        return self.rank
