"""The base class of all mixers: what Keras needs of them."""

from typing import Any, Self

import keras

from flash_tf import renamed
from flash_tf.layers.base import SameShape
from flash_tf.layers.common import options
from flash_tf.layers.remat import Recomputed


class Mixer(SameShape, Recomputed, keras.layers.Layer):
    """A layer `[b, n, d]` -> `[b, n, d]`; `flash_tf.layers.mixers` describes the members."""

    gated_unit = False  # whether it contains a feed-forward part, so that a block needs no other
    longest: int | None = None  # the most tokens of a text, or None

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.input_spec = keras.layers.InputSpec(ndim=3)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **options(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        if "go_backwards" in config:
            other = "a mixer with causal=False, or flip the text before and after a second mixer"
            raise ValueError(f"keras.layers.Bidirectional needs a recurrent layer, got {cls.__name__}: use {other}")
        return cls(**renamed.options(config))
