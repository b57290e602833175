"""The signatures of exported classifiers and regressors."""

import tensorflow as tf

from flash_tf.exporting.readers import IdReader, checked
from flash_tf.exporting.signatures import Served

SERVED = ("classifier", "regressor")  # types of models


class ServedTask(Served):
    """Gives the classes or numbers of texts, of pairs of texts, or of rows of ids; see `Served`.

    Texts become rows as in training. A row that is too long is refused, and not cut.

    Attributes:
      names: The names of the classes; None without.
    """

    names: list[str] | None = None

    def endpoints(self):
        if not self.writes:
            return {"predict": (self.predict, [IdReader.spec])}
        text = self._reader.spec
        pair = [text, tf.TensorSpec(text.shape, text.dtype, "text_b")]
        return {"predict": (self.predict_text, [text]), "predict_pair": (self.predict_pair, pair)}

    def predict(self, ids):
        """Rows of ids `[b, n]` -> `probabilities [b, classes]` and `label [b]`, or `number [b]` of a regressor."""
        batch = self._ids.read(ids)
        found = tf.cast(self._model(batch.ids, padding_mask=batch.real, training=False), tf.float32)
        if self._model.FEWEST == 1:
            return {"number": found[:, 0]}
        label = tf.argmax(found, axis=1, output_type=tf.int32)
        names = {} if self.names is None else {"name": tf.gather(tf.constant(self.names), label)}
        return {"probabilities": tf.nn.softmax(found), "label": label, **names}

    def plain_logits(self, ids):
        """Rows of ids `[b, n]` without padding -> the model's output, without checks."""
        return tf.cast(self._model(ids, training=False), tf.float32)

    def predict_text(self, text):
        """Texts `[b]` -> the results of `predict`."""
        return self.predict(self._rows(self._ragged(text)))

    def predict_pair(self, text, text_b):
        """Texts `[b]` and their second texts `[b]` -> the results of `predict`."""
        need = "predict_pair needs as many texts as second texts, got", tf.shape(text), tf.shape(text_b)
        text = checked(text, (tf.size(text) == tf.size(text_b), *need))
        return self.predict(self._rows(self._ragged(text), self._ragged(text_b)))

    def _ragged(self, text):
        batch = self._reader.read(text)
        return tf.RaggedTensor.from_tensor(batch.ids, batch.lengths)

    def _rows(self, *texts):
        one = lambda token: tf.fill([texts[0].nrows(), 1], token)  # noqa: E731
        parts = [one(self._tokenizer.cls_id)]
        for ids in texts:
            parts += [ids, one(self._tokenizer.eos_id)]
        return tf.concat(parts, axis=1).to_tensor(self._tokenizer.pad_id)
