"""Classification of text pairs with two towers that share weights."""

import keras
import numpy as np
from keras import ops

from flash_tf.models.classifier import Classifier
from flash_tf.models.language_model import MODELS, unpack
from kernels_xla.common.spec import Tensor


@MODELS.register("matcher")
@keras.saving.register_keras_serializable("flash_tf")
class Matcher(Classifier):
    """Two texts, `[b, 2, n]` -> logits of classes `[b, classes]`: `Classifier`'s network over [x, y, x y, x - y].

    x and y are the mean-pooled outputs of one stack for both texts: the Long-Range Arena's model for Retrieval.

    Constructor: see `Classifier`.

    Call arguments:
      token_ids: Integers `[b, 2, n]`, or a dictionary of all call arguments, as `fit` passes it.
      padding_mask: Bool `[b, 2, n]`, True at real tokens.
      positions: Integers `[1, n]`, for both texts of all rows.

    Returns:
      Logits `[b, classes]`, in the compute dtype.

    Example:
      >>> import numpy as np
      >>> options = {"vocabulary_size": 256, "width": 16, "depth": 2, "max_length": 50}
      >>> model = Matcher(2, mixer={"type": "flash", "chunk_size": 8, "key_dim": 8}, **options)
      >>> model(np.zeros((3, 2, 50), "int32")).shape
      TensorShape([3, 2])
    """

    PARTS, TEXTS = 4, 2

    def call(
        self,
        token_ids: Tensor,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        given = unpack(token_ids, {"padding_mask": padding_mask, "positions": positions}, mask)
        ids = given["token_ids"]
        if len(ids.shape) != 3 or ids.shape[1] != 2:
            raise ValueError(f"{self.name} needs two texts a row, token_ids [b, 2, n], got shape {tuple(ids.shape)}")
        pairs = {name: x for name, x in given.items() if len(np.shape(x)) == 3}
        given |= {name: ops.reshape(x, (-1, ops.shape(x)[-1])) for name, x in pairs.items()}
        means = ops.reshape(self.mean(**given, training=training), (-1, 2, self.width))
        x, y = means[:, 0], means[:, 1]
        return self.outer(self.inner(ops.concatenate([x, y, x * y, x - y], axis=-1)))
