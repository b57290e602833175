"""A language model without its head."""

from typing import Any

import keras


class Backbone(keras.Model):
    """Token ids `[b, n]` -> the activations `[b, n, d]` of the last layer. It shares the weights of its model.

    Args:
      model: A language model, or the model of a task.

    Call arguments:
      token_ids: Integers `[b, n]`.
      padding_mask: Bool `[b, n]`, True at real tokens.
      positions: Integers `[b, n]` or `[1, n]`.
    """

    def __init__(self, model: keras.Model):
        super().__init__(name=f"{model.name}_backbone", dtype=model.dtype_policy)
        self.model = model

    def call(
        self, token_ids: Any, padding_mask: Any = None, positions: Any = None, training: bool | None = None
    ) -> Any:
        return self.model.encode(token_ids, padding_mask=padding_mask, positions=positions, training=training)

    def compute_output_spec(self, token_ids: Any, *arguments, **options) -> keras.KerasTensor:
        del arguments, options
        return keras.KerasTensor((*token_ids.shape, self.model.width), self.compute_dtype)
