"""OffsetScale: several heads from one shared representation, each by a scale and an offset."""

from typing import Any

import keras
from keras import ops

from flash_tf.layers.base import Base
from flash_tf.layers.common import normal, options
from kernels_xla.common.spec import Tensor


@keras.saving.register_keras_serializable("flash_tf")
class OffsetScale(Base, keras.layers.Layer):
    """Makes named heads from z: `head = gamma_head z + beta_head`, elementwise.

    Source: FLASH (arXiv:2202.10447), section 2.2, the transformations Q and K. The weights carry the head's name,
    because implementations disagree on the order.

    Args:
      heads: Names of the heads.
      gamma: "ones", or "normal" for N(0, 0.02), as in the paper's pseudocode. With "normal", GAU learns only under the
        paper's scale with a bias: otherwise its attention weights start near 1e-5.
      use_bias: Whether there are offsets; without them, `head = gamma_head z`.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      z: Float tensor `[..., s]`.

    Returns:
      Dictionary: name -> `[..., s]`.

    Example:
      >>> sorted(OffsetScale(["q", "k"])(ops.ones((1, 3, 4))))
      ['k', 'q']
    """

    def __init__(self, heads: list, gamma: str = "ones", use_bias: bool = True, **kwargs):
        super().__init__(**kwargs)
        if gamma not in ("ones", "normal"):
            raise ValueError(f"OffsetScale: gamma must be 'ones' or 'normal', got {gamma!r}")
        names = list(heads)
        if not names or len({*names}) < len(names) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"OffsetScale needs different names as heads, got {heads!r}")
        self.heads, self.gamma, self.use_bias = names, gamma, use_bias
        self.supports_masking = True

    def build(self, z_shape: tuple) -> None:
        initializer = "ones" if self.gamma == "ones" else normal()
        weight = lambda kind, head, start: self.add_weight(  # noqa: E731
            name=f"{kind}_{head}", shape=(z_shape[-1],), initializer=start
        )
        self.scales = [weight("gamma", head, initializer) for head in self.heads]
        self.offsets = [weight("beta", head, "zeros") if self.use_bias else None for head in self.heads]
        self.built = True

    def call(self, z: Tensor) -> Tensor:
        scaled = {head: z * ops.cast(gamma, z.dtype) for head, gamma in zip(self.heads, self.scales, strict=True)}
        if not self.use_bias:
            return scaled
        offsets = zip(self.heads, self.offsets, strict=True)
        return {head: scaled[head] + ops.cast(beta, z.dtype) for head, beta in offsets}

    def stacked(self, dtype: str) -> tuple[Tensor, Tensor]:
        """Scales and offsets of all heads, `[h, s]` each, in their order; offsets of 0 without them."""
        scales = ops.stack([ops.cast(gamma, dtype) for gamma in self.scales])
        if not self.use_bias:
            return scales, ops.zeros_like(scales)
        return scales, ops.stack([ops.cast(beta, dtype) for beta in self.offsets])

    def compute_mask(self, z: Tensor, previous_mask: Tensor | None = None) -> dict[str, Tensor | None]:
        """The mask of z, for each head."""
        del z
        return dict.fromkeys(self.heads, previous_mask)

    def compute_output_shape(self, z_shape: tuple) -> dict[str, tuple]:
        return dict.fromkeys(self.heads, z_shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **options(self)}
