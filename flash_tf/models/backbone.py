"""A language model's stack as a layer of another model."""

from typing import Any, Self

import keras

from flash_tf.layers.base import Base
from flash_tf.layers.masking import padding_of
from kernels_xla.common.spec import Tensor


@keras.saving.register_keras_serializable("flash_tf")
class Backbone(Base, keras.layers.Layer):
    """Token ids `[b, n]` -> the normalized activations `[b, n, d]` of a model's last layer, without its head.

    `model.backbone` gives one. It shares the model's weights, and a `.keras` file of the model around it holds them.
    `backbone.trainable = False` freezes them.

    Args:
      model: A model of `flash_tf.models`.
      **kwargs: Passed to `keras.layers.Layer`.

    Call arguments:
      token_ids: Integers `[b, n]`.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of the ids, if there is one.
      training: Whether dropout is active.

    Returns:
      Float tensor `[b, n, d]`, arbitrary at padding.

    Example:
      >>> from flash_tf.models import MaskedLM
      >>> model = MaskedLM(100, width=16, depth=2, mixer={"type": "flash", "chunk_size": 4, "key_dim": 8})
      >>> ids = keras.Input((None,), dtype="int32")
      >>> x = keras.layers.GlobalAveragePooling1D()(model.backbone(ids))
      >>> keras.Model(ids, keras.layers.Dense(3)(x)).output_shape
      (None, 3)
    """

    def __init__(self, model: keras.Model, **kwargs):
        super().__init__(**{"dtype": model.dtype_policy, **kwargs})
        self.model, self.supports_masking = model, True
        self.autocast = False  # Keras would round ids that come as floats, as of an Input without a dtype

    def build(self, input_shape: tuple) -> None:
        del input_shape  # no weight depends on it
        if not self.model.built:
            self.model.build()
        self.built = True

    def call(
        self,
        token_ids: Tensor,
        padding_mask: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        padding_mask = padding_of(token_ids, padding_mask, mask)
        return self.model.encode(token_ids, padding_mask=padding_mask, training=training)

    def compute_output_spec(self, token_ids: Tensor, *arguments: Any, **options: Any) -> keras.KerasTensor:
        """The output of a symbolic call. Keras on JAX cannot trace an unknown length."""
        del arguments, options
        return keras.KerasTensor((*token_ids.shape, self.model.width), self.compute_dtype)

    def compute_output_shape(self, token_ids_shape: tuple) -> tuple:
        """For `keras.layers.TimeDistributed`."""
        return (*token_ids_shape, self.model.width)

    def get_config(self) -> dict[str, Any]:
        model = keras.saving.serialize_keras_object(self.model)
        model.pop("build_config", None)  # `build` makes its weights
        return {**super().get_config(), "model": model}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**{**config, "model": keras.saving.deserialize_keras_object(config["model"])})
