"""Regression from a text: a number in place of classes."""

import keras

from flash_tf.models.classifier import Classifier
from flash_tf.models.language_model import MODELS, LanguageModel
from flash_tf.registry import takes_options_of


@MODELS.register("regressor")
@takes_options_of(LanguageModel, without=("head_bias", "tie_embeddings"))
@keras.saving.register_keras_serializable("flash_tf")
class Regressor(Classifier):
    """Token ids `[b, n]` -> numbers `[b, 1]`, by `Classifier`'s network with one output.

    Args:
      hidden: Width of the hidden layer.
      position_embedding: As for `Classifier`.
      **kwargs: As for `Classifier`, except `classes`.

    Call arguments:
      token_ids: Integers `[b, n]`, or a dictionary of all call arguments, as `fit` passes it.
      padding_mask: Bool `[b, n]`, True at real tokens; a row without one has the mean zero.
      positions: Integers `[b, n]` or `[1, n]`.

    Returns:
      Numbers `[b, 1]`, in the compute dtype.

    Example:
      >>> import numpy as np
      >>> options = {"vocabulary_size": 256, "width": 16, "depth": 2, "max_length": 50}
      >>> model = Regressor(mixer={"type": "flash", "chunk_size": 8, "key_dim": 8}, **options)
      >>> model(np.zeros((3, 50), "int32")).shape
      TensorShape([3, 1])
    """

    FEWEST = 1

    def __init__(self, hidden: int = 128, position_embedding: str | None = "learned", **kwargs):
        super().__init__(1, hidden, position_embedding, **kwargs)
