"""Masked language model over any mixer."""

import keras
from keras import ops

from flash_tf.models import MODELS
from flash_tf.models.language_model import LanguageModel, unpack


@MODELS.register("masked_lm")
@keras.saving.register_keras_serializable("flash_tf")
class MaskedLM(LanguageModel):
    """Token ids `[b, n]` -> logits of the original tokens, at the masked positions or at all.

    Args:
      vocabulary_size: V.
      width: d.
      depth: Number of blocks; a block is a mixer, and a feed-forward layer if there is one.
      mixer: `{"type": name, **options}` of a mixer; its `causal` is set here.
      feedforward: `{"type": name, **options}`, or None: a gated attention unit needs none.
      norm: "scale_norm" or "layer_norm".
      position_embedding: "scaled_sin", "learned", or None.
      max_length: The longest sequence that learned positions take; None for the others.
      dropout: Rate on the output of every layer.
      remat: Whether layers are computed again in the backward pass instead of kept: less memory, a third more time.
      **kwargs: Passed to `keras.Model`.

    Call arguments:
      token_ids: Integers `[b, n]`, or a dictionary of all call arguments, as `fit` passes it.
      masked_positions: Integers `[b, k]`, where to run the head; None for everywhere.
      padding_mask: Bool `[b, n]`, True at real tokens.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Logits `[b, k, V]`, or `[b, n, V]`, in the compute dtype.

    Example:
      >>> import numpy as np
      >>> model = MaskedLM(100, width=16, depth=2, mixer={"type": "quadratic", "key_dim": 8})
      >>> model(np.zeros((2, 10), "int32"), masked_positions=np.array([[3, 4], [0, 9]])).shape
      TensorShape([2, 2, 100])
    """

    causal = False

    def __init__(
        self,
        vocabulary_size: int,
        width: int,
        depth: int,
        mixer: dict,
        feedforward: dict | None = None,
        norm: str = "scale_norm",
        position_embedding: str | None = "scaled_sin",
        max_length: int | None = None,
        dropout: float = 0.0,
        remat: bool = False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.vocabulary_size, self.width, self.depth, self.mixer = vocabulary_size, width, depth, dict(mixer)
        self.feedforward, self.norm, self.position_embedding = feedforward, norm, position_embedding
        self.max_length, self.dropout, self.remat = max_length, dropout, remat
        self._check()
        self._make_layers()

    def call(
        self, token_ids, masked_positions=None, padding_mask=None, segment_ids=None, positions=None, training=None
    ):
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "positions": positions}
        given = unpack(token_ids, {"masked_positions": masked_positions, **masks})
        at = given.pop("masked_positions")
        x = self.encode(**given, training=training)
        if at is not None:
            x = ops.take_along_axis(x, ops.expand_dims(ops.cast(at, "int32"), -1), axis=1)
        return self.head(x)

    def decode_state_bytes(self, n: int, itemsize: int = 2) -> None:
        """None: a masked model does not decode."""
