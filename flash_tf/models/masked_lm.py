"""Masked language model over any mixer."""

import keras
from keras import ops

from flash_tf.filling import fill_mask
from flash_tf.models.language_model import MODELS, LanguageModel, unpack
from kernels_xla.common.spec import Tensor


@MODELS.register("masked_lm")
@keras.saving.register_keras_serializable("flash_tf")
class MaskedLM(LanguageModel):
    """Token ids `[b, n]` -> logits of the original tokens, at the masked positions or everywhere.

    Constructor: see `LanguageModel`.

    Call arguments:
      token_ids: Integers `[b, n]`, or a dictionary of all call arguments, as `fit` passes it.
      masked_positions: Integers `[b, k]`, the positions where the head runs; None for all.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of the ids, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.
      token_type_ids: Integers `[b, n]`, below `token_types`; 0 by default.

    Returns:
      Logits `[b, k, V]`, or `[b, n, V]`, in the compute dtype.

    Example:
      >>> import numpy as np
      >>> model = MaskedLM(100, width=16, depth=2, mixer={"type": "gau", "key_dim": 8})
      >>> model(np.zeros((2, 10), "int32"), masked_positions=np.array([[3, 4], [0, 9]])).shape
      TensorShape([2, 2, 100])
    """

    causal = False

    def call(
        self,
        token_ids: Tensor,
        masked_positions: Tensor | None = None,
        padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "positions": positions}
        masks["token_type_ids"] = token_type_ids
        given = unpack(token_ids, {"masked_positions": masked_positions, **masks}, mask)
        return self.head(self.encode(**given, training=training))

    def compute_output_spec(
        self, token_ids: Tensor, masked_positions: Tensor | None = None, *arguments, **options
    ) -> keras.KerasTensor:
        at = unpack(token_ids, {"masked_positions": masked_positions})["masked_positions"]
        return super().compute_output_spec(token_ids if at is None else at)

    def encode(self, token_ids: Tensor, masked_positions: Tensor | None = None, **options) -> Tensor:
        """As `LanguageModel.encode`; with masked positions, the activations there alone, `[b, k, d]`."""
        x = super().encode(token_ids, **options)
        if masked_positions is None:
            return x
        return ops.take_along_axis(x, ops.expand_dims(ops.cast(masked_positions, "int32"), -1), axis=1)

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[dict]]:
        """The likeliest tokens at each `<mask>` of a text; see `flash_tf.filling.fill_mask`."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name} takes token ids: it has no tokenizer for texts")
        return fill_mask(self, self.tokenizer, text, top_k=top_k, max_tokens=self.longest)

    def decode_state_bytes(self, n: int, itemsize: int = 2) -> None:
        """None: a masked model does not decode."""
