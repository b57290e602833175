"""Next-token language model over any causal mixer."""

import keras

from flash_tf.models import MODELS
from flash_tf.models.language_model import LanguageModel, unpack


@MODELS.register("causal_lm")
@keras.saving.register_keras_serializable("flash_tf")
class CausalLM(LanguageModel):
    """Token ids `[b, n]` -> logits `[b, n, V]` of the token that follows each.

    Constructor: see `LanguageModel`.

    Call arguments:
      token_ids: Integers `[b, n]`, or a dictionary of all call arguments, as `fit` passes it.
      padding_mask: Bool `[b, n]`, True at real tokens.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Logits `[b, n, V]` in the compute dtype.

    Example:
      >>> import numpy as np
      >>> model = CausalLM(100, width=16, depth=2, mixer={"type": "mixed_chunk", "chunk_size": 4, "key_dim": 8})
      >>> model(np.zeros((2, 10), "int32")).shape
      TensorShape([2, 10, 100])
    """

    causal = True

    def call(self, token_ids, padding_mask=None, segment_ids=None, positions=None, training=None):
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "positions": positions}
        return self.head(self.encode(**unpack(token_ids, masks), training=training))

    def decode_state_bytes(self, n: int, itemsize: int = 2) -> int | None:
        """Bytes to decode one sequence of up to n tokens, or None where the mixer cannot."""
        layers = [mixer.state_bytes(n, itemsize) for mixer in self.mixers]
        return None if None in layers else sum(layers)
