"""The signatures of exported classifiers, regressors, matchers and models of questions."""

import tensorflow as tf
import tensorflow_text

from flash_tf.data.encoders import IGNORED
from flash_tf.data.spans import LEAST
from flash_tf.data.tokenizer import SPACES
from flash_tf.exporting.readers import IdReader, checked
from flash_tf.exporting.signatures import Served
from flash_tf.models.span import best_spans
from flash_tf.training.tasks import NEVER, Extraction

PARTS = 256  # the most rows of a context


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
        return self._results(self._model(batch.ids, padding_mask=batch.real, training=False))

    def _results(self, found):
        found = tf.cast(found, tf.float32)
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
        text = self._as_many("predict_pair", text, text_b)
        return self.predict(self._rows(self._ragged(text), self._ragged(text_b)))

    def _as_many(self, name, text, text_b):
        need = f"{name} needs as many texts as second texts, got", tf.shape(text), tf.shape(text_b)
        return checked(text, (tf.shape(text)[0] == tf.shape(text_b)[0], *need))

    def _ragged(self, text):
        batch = self._reader.read(text)
        return tf.RaggedTensor.from_tensor(batch.ids, batch.lengths)

    def _rows(self, *texts):
        one = lambda token: tf.fill([texts[0].nrows(), 1], token)  # noqa: E731
        parts = [one(self._tokenizer.cls_id)]
        for ids in texts:
            parts += [ids, one(self._tokenizer.eos_id)]
        return tf.concat(parts, axis=1).to_tensor(self._tokenizer.pad_id)


class ServedMatcher(ServedTask):
    """Gives the classes of pairs of texts, or of pairs of rows of ids, by two towers; see `ServedTask`."""

    def endpoints(self):
        spec = self._reader.spec
        pair = [spec, tf.TensorSpec(spec.shape, spec.dtype, f"{spec.name}_b")]
        return {"predict": (self.predict_texts if self.writes else self.predict_rows, pair)}

    def predict_texts(self, text, text_b):
        """Texts `[b]` and their second texts `[b]` -> the results of `predict`."""
        text = self._as_many("predict", text, text_b)
        return self.predict_rows(self._rows(self._ragged(text)), self._rows(self._ragged(text_b)))

    def predict_rows(self, ids, ids_b):
        """Rows of ids `[b, n]` and `[b, m]` -> the results of `predict`."""
        one, other = self._ids.read(self._as_many("predict", ids, ids_b)), self._ids.read(ids_b)
        width = tf.maximum(tf.shape(one.ids)[1], tf.shape(other.ids)[1])
        wide = lambda x, fill: tf.pad(x, [[0, 0], [0, width - tf.shape(x)[1]]], constant_values=fill)  # noqa: E731
        both = tf.stack([wide(one.ids, self._tokenizer.pad_id), wide(other.ids, self._tokenizer.pad_id)], axis=1)
        real = tf.stack([wide(one.real, False), wide(other.real, False)], axis=1)
        return self._results(self._model(both, padding_mask=real, training=False))

    def plain_logits(self, ids):
        """ValueError: a file of TensorFlow Lite takes one row."""
        raise ValueError("TensorFlow Lite takes one text, and a matcher reads two: leave --tflite out")


class ServedSpan(Served):
    """Answers questions over contexts of any length, which become rows as in training; see `Served` and `SpanEncoder`.

    It reads text alone: an answer is a part of its context.
    """

    def endpoints(self):
        if not self.writes:
            raise ValueError("the export of a model of questions reads text: leave --ids-only and --tflite out")
        if self.limits.longest < LEAST:
            raise ValueError(f"a row with a question needs --max-length {LEAST} or more, got {self.limits.longest}")
        specs = [tf.TensorSpec([None], tf.string, name) for name in ("question", "context")]
        return {"predict": (self.predict, specs)}

    def predict(self, question, context):
        """Questions `[b]` and their contexts `[b]` -> `answer [b]`, "" without one, `best_span [b]` and `score [b]`.

        The score is how much higher the logits of the best span are than the logits of no answer.
        """
        need = "predict needs as many questions as contexts, got", tf.shape(question), tf.shape(context)
        question = checked(question, (tf.size(question) == tf.size(context), *need))
        text, number = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.float32)
        found = tf.map_fn(self._answer, (question, context), fn_output_signature=(text, text, number))
        return dict(zip(("answer", "best_span", "score"), found, strict=True))

    def _answer(self, given):
        """A question and its context, both scalars -> the answer, the best span and its score."""
        question, context = given
        # The words of `SpanEncoder`. TF-Text's WhitespaceTokenizer cuts a white space of several bytes in two.
        words, begins, ends = (x[0] for x in tensorflow_text.regex_split_with_offsets([context], f"[{SPACES}]+"))
        tokens, of_word = self._parts(question, words)
        real = tokens != self._tokenizer.pad_id
        logits = tf.cast(self._model(tokens, padding_mask=real, training=False), tf.float32)
        spans = best_spans(tf.where(real[..., None], logits, NEVER), of_word, Extraction.longest)
        best, nothing = spans[tf.argmax(spans[:, 0])], tf.reduce_min(spans[:, 1])
        score = tf.maximum(best[0], NEVER) - nothing
        first, last = tf.cast(best[2], tf.int32), tf.cast(best[3], tf.int32)
        found = lambda: tf.strings.substr(context, begins[first], ends[last] - begins[first])  # noqa: E731
        span = tf.cond(tf.math.is_finite(best[0]), found, lambda: tf.constant(""))
        none = self._model.no_answer & (score < self._model.no_answer_threshold)
        return tf.where(none, "", span), span, score

    def _parts(self, question, words):
        """Rows of ids `[parts, n]`, and the number of each token's word, -1 outside the context."""
        n, tokenizer = self.limits.longest, self._tokenizer
        asked, pieces = self._reader.encode(question[None])[0], self._reader.encode_words(words)
        ids, of_word = pieces.flat_values, tf.cast(pieces.value_rowids(), tf.int32)
        start = tf.concat([[tokenizer.cls_id], asked[: n // 4], [tokenizer.eos_id]], 0)
        room = n - tf.size(start) - 1
        firsts = tf.range(0, tf.maximum(1, tf.size(ids) - room // 2), room - room // 2)
        need = f"predict needs a context of at most {PARTS} overlapping parts, got"
        firsts = checked(firsts, (tf.size(firsts) <= PARTS, need, tf.size(firsts)))
        at = firsts[:, None] + tf.range(room)
        inside = tf.RaggedTensor.from_tensor(at, tf.clip_by_value(tf.size(ids) - firsts, 0, room))
        rows = tf.ones_like(firsts)[:, None]
        around = lambda before, part, after: tf.concat([rows * before, part, rows * after], 1)  # noqa: E731
        tokens = around(start, tf.gather(ids, inside), tokenizer.eos_id)
        numbers = around(tf.fill([tf.size(start)], IGNORED), tf.gather(of_word, inside), IGNORED)
        return tokens.to_tensor(tokenizer.pad_id, shape=[None, n]), numbers.to_tensor(IGNORED, shape=[None, n])


SERVED = {"classifier": ServedTask, "regressor": ServedTask, "matcher": ServedMatcher, "span": ServedSpan}
