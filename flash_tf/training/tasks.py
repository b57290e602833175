"""Objectives of tasks: the loss of labelled rows, and the metrics of their predictions."""

from typing import TYPE_CHECKING

import keras
import numpy as np
from keras import ops

from flash_tf.config import Config
from flash_tf.data.encoders import AnswerEncoder, ClassLabel, NumberLabel, TextEncoder, TwoTextEncoder
from flash_tf.data.rows import Placed, Row, RowEncoder, placed
from flash_tf.data.sources import SOURCES
from flash_tf.data.spans import QUOTES, WORD, SpanEncoder
from flash_tf.models.span import best_spans
from flash_tf.training import metrics
from flash_tf.training.objective import OBJECTIVES, Examples, Objective
from kernels_xla.common.spec import Tensor

if TYPE_CHECKING:
    from flash_tf.data.tokenizer import Tokenizer

Outputs = dict[str, np.ndarray]
NEVER = -1e9  # the logit of what cannot be


class TaskObjective:
    """The loss of a task's rows, and what an evaluation says of a split.

    A subclass defines `encoder_of`, `outputs`, `metrics` and `predictions`.

    Args:
      config: The experiment.
      tokenizer: Its tokenizer.

    Attributes:
      encoder: Makes the rows.
      METRICS: The names of its metrics. The higher, the better.
    """

    METRICS: tuple[str, ...]

    overlap = 0  # a row has no token beyond the sequence length

    def __init__(self, config: Config, tokenizer: "Tokenizer"):
        self.config, self.encoder, self.pad_id = config, self.encoder_of(config, tokenizer), tokenizer.pad_id

    @staticmethod
    def encoder_of(config: Config, tokenizer: "Tokenizer | None") -> RowEncoder:
        """Makes the rows; without a tokenizer it gives texts alone. ValueError for options that do not fit."""
        raise NotImplementedError

    def outputs(self, model: keras.Model, batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        """What a model says of rows, each `[b, ...]`.

        Among them are `loss`, float32 `[b]`, its sum over a row's labels, and `weight`, float32 `[b]`, their number.
        """
        raise NotImplementedError

    def metrics(self, outputs: Outputs) -> dict[str, float]:
        """The metrics of a split, beside its loss, from the outputs of its rows."""
        raise NotImplementedError

    def predictions(self, examples: list[Placed], rows: list[Row], outputs: Outputs) -> list[dict]:
        """A JSON object for each example, from the outputs of its rows."""
        raise NotImplementedError

    def loss(self, model: keras.Model, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed loss and the number of labels, float32, for training."""
        found = self.outputs(model, batch, training=True)
        return ops.sum(found["loss"]), ops.sum(found["weight"])

    def summarize(self, outputs: Outputs) -> dict[str, float]:
        """The mean `loss` of a label, the task's metrics, and the number of `labels`."""
        weights = outputs["weight"].astype(np.float64)
        counted = {name: x[weights > 0] for name, x in outputs.items()}
        loss = float(counted["loss"].sum(dtype=np.float64) / max(weights.sum(), 1))
        return {"loss": loss, **self.metrics(counted), "labels": int(weights.sum())}

    def read(self, model: keras.Model, batch: dict[str, Tensor], training: bool) -> Tensor:
        """What the model's head gives, float32."""
        tokens = batch["tokens"]
        return ops.cast(model(tokens, padding_mask=tokens != self.pad_id, training=training), "float32")


class Classification(TaskObjective):
    """Cross-entropy of classes, for texts and for pairs of texts in one row."""

    METRICS = ("accuracy", "f1", "matthews")

    def __init__(self, config: Config, tokenizer: "Tokenizer"):
        super().__init__(config, tokenizer)
        self._names = config.data.labels

    @staticmethod
    def encoder_of(config, tokenizer):
        data = config.data
        label = ClassLabel(config.model["classes"], data.labels)
        return TextEncoder(tokenizer, data.sequence_length, data.columns, label)

    def outputs(self, model, batch, training):
        logits, labels = self.read(model, batch, training), batch["labels"][:, 0]
        weight = ops.cast(labels >= 0, "float32")
        nll = ops.sparse_categorical_crossentropy(ops.maximum(labels, 0), logits, from_logits=True)
        return {"loss": nll * weight, "weight": weight, "labels": labels, "logits": logits}

    def metrics(self, outputs):
        classes = outputs["logits"].shape[1]
        counts = metrics.confusion(outputs["labels"], outputs["logits"].argmax(axis=1), classes)
        f1 = metrics.f1(counts)
        return {
            "accuracy": metrics.accuracy(counts),
            "f1": float(f1[1] if classes == 2 else f1.mean()),
            "matthews": metrics.matthews(counts),
        }

    def predictions(self, examples, rows, outputs):
        probabilities = ops.convert_to_numpy(ops.softmax(outputs["logits"]))
        return [
            {"label": self._name(int(row.argmax())), "probabilities": [round(float(p), 6) for p in row]}
            for row in probabilities
        ]

    def _name(self, number):
        return number if self._names is None else self._names[number]


class Matching(Classification):
    """Cross-entropy of classes, for pairs of texts in two towers."""

    @staticmethod
    def encoder_of(config, tokenizer):
        data = config.data
        label = ClassLabel(config.model["classes"], data.labels)
        return TwoTextEncoder(tokenizer, data.sequence_length, data.columns, label)

    def read(self, model, batch, training):
        both = ops.stack([batch["tokens"], batch["tokens_b"]], axis=1)
        return super().read(model, {"tokens": both}, training)


class Regression(TaskObjective):
    """Mean squared error of a number."""

    METRICS = ("pearson", "spearman")

    @staticmethod
    def encoder_of(config, tokenizer):
        return TextEncoder(tokenizer, config.data.sequence_length, config.data.columns, NumberLabel())

    def outputs(self, model, batch, training):
        numbers, labels = self.read(model, batch, training)[:, 0], batch["labels"][:, 0]
        there = ops.isfinite(labels)
        loss = ops.where(there, (numbers - ops.where(there, labels, 0.0)) ** 2, 0.0)
        return {"loss": loss, "weight": ops.cast(there, "float32"), "labels": labels, "numbers": numbers}

    def metrics(self, outputs):
        both = outputs["labels"], outputs["numbers"]
        return {"pearson": metrics.pearson(*both), "spearman": metrics.spearman(*both)}

    def predictions(self, examples, rows, outputs):
        return [{"label": float(number)} for number in outputs["numbers"]]


class Answering(TaskObjective):
    """Cross-entropy of the labels in rows of a causal model: an answer after its prompt."""

    METRICS = ("accuracy", "exact_match")

    @staticmethod
    def encoder_of(config, tokenizer):
        return AnswerEncoder(tokenizer, config.data.sequence_length, config.data.columns)

    loss = Objective.loss  # in blocks of tokens

    def examples(self, batch, training):
        labels = batch["labels"]
        return Examples(batch["tokens"], {}, ops.maximum(labels, 0), ops.cast(labels >= 0, "float32"))

    def outputs(self, model, batch, training):
        tokens, _, labels, weights = self.examples(batch, training)
        logits = ops.cast(model(tokens, training=training), "float32")
        nll = ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        right = ops.cast(ops.cast(ops.argmax(logits, axis=-1), labels.dtype) == labels, "float32")
        return {"loss": _sum(nll, weights), "weight": ops.sum(weights, axis=1), "right": _sum(right, weights)}

    def metrics(self, outputs):
        """The share of labels that have the highest logit, and of rows in which all have: their greedy answer."""
        right, labels = outputs["right"], outputs["weight"]
        return {"accuracy": float(right.sum() / max(labels.sum(), 1)), "exact_match": float((right == labels).mean())}


class Extraction(TaskObjective):
    """Cross-entropy of the first and the last token of an answer; the answers of whole texts.

    Of the rows of a text the one with the best span gives the answer. There is none if in every row the sum of the
    logits at `<cls>` is above this span's, less `no_answer_threshold`.
    """

    METRICS = ("exact_match", "f1", "has_answer_exact_match", "has_answer_f1", "best_exact_match", "best_f1")
    longest = 30  # tokens of an answer, as in BERT's

    @staticmethod
    def encoder_of(config, tokenizer):
        data = config.data
        return SpanEncoder(tokenizer, data.sequence_length, data.columns, data.answerless_rows)

    def outputs(self, model, batch, training):
        logits, labels = self.read(model, batch, training), batch["labels"]
        logits = ops.where((batch["tokens"] != self.pad_id)[..., None], logits, NEVER)
        weight = ops.cast(labels[:, 0] >= 0, "float32")
        targets, over = ops.maximum(labels, 0), ops.transpose(logits, [0, 2, 1])
        nll = ops.mean(ops.sparse_categorical_crossentropy(targets, over, from_logits=True), axis=1)
        found = {"loss": ops.where(weight > 0, nll, 0.0), "weight": weight}
        if training:
            return found
        return {**found, "spans": best_spans(logits, batch["words"], self.longest), "part": batch["part"][:, 0]}

    def summarize(self, outputs):
        weights, real = outputs["weight"].astype(np.float64), outputs["part"] >= 0
        found = list(self._best_spans(self._validation(), {name: x[real] for name, x in outputs.items()}))
        scores, spans, none, has_answer = zip(*(self._measured(*one) for one in found), strict=True)
        given = [self._answers(score) for score in scores]
        loss = outputs["loss"].sum(dtype=np.float64) / max(weights.sum(), 1)
        measured = metrics.of_questions(*map(np.array, (scores, given, spans, none, has_answer)))
        return {"loss": float(loss), **measured, "questions": len(found)}

    def predictions(self, examples, rows, outputs):
        return [
            {"answer": span if self._answers(score) else "", "best_span": span, "score": score}
            for _, span, score in self._best_spans(examples, outputs)
        ]

    def _answers(self, score):
        """Whether a question with this score gets its best span."""
        model = self.config.model
        return not model.get("no_answer", True) or score >= model.get("no_answer_threshold", 0.0)

    def _validation(self):
        source = SOURCES.build(self.config.data.source)
        for shard in source.shards("validation"):
            yield from placed(source, "validation", shard)

    def _best_spans(self, examples, outputs):
        """Each example with the text of its best span, and how far its logits are above those without an answer."""
        starts = np.flatnonzero(outputs["part"] == 0)
        rows = np.split(outputs["spans"], starts[1:])
        for i, (one, spans) in enumerate(zip(examples, rows, strict=False)):  # fewer rows in a limited evaluation
            last = 0 < i == len(rows) - 1
            if last and len(spans) < sum(1 for _ in self.encoder.rows([one], labelled=False)):
                return  # the limit has cut this question
            best, nothing = spans[spans[:, 0].argmax()], spans[:, 1].min()
            score = max(float(best[0]), NEVER) - float(nothing)
            yield one, self._text(one, int(best[2]), int(best[3])) if np.isfinite(best[0]) else "", score

    def _text(self, placed, first, last):
        context = self.encoder.context(placed)
        words = list(WORD.finditer(context))
        return context[words[first].start() : words[last].end()]

    def _measured(self, placed, span, score):
        """The score of an example; exact match and F1 of its span and of no answer; whether it has an answer.

        They go by SQuAD's rules or, for names without a place, by TriviaQA's.
        """
        answers = self.encoder.keys.get(placed, "answers")
        texts, quotes = (answers["text"], "") if isinstance(answers, dict) else (answers, QUOTES)
        both = [metrics.answer_metrics(answer, list(texts), quotes) for answer in (span, "")]
        return score, *both, len(texts) > 0


def _sum(x, weights):
    """The sum over the labels of each row, `[b]`."""
    return ops.sum(ops.where(weights > 0, x * weights, 0.0), axis=1)


TASKS = {"classifier": Classification, "matcher": Matching, "regressor": Regression, "span": Extraction}


def objective_of(config: Config) -> type:
    """The class of a config's objective: a language model's, or a task's, which reads labelled examples.

    A causal model reads labelled examples if its source has nothing else, or if `data.columns` names their parts.

    Raises:
      ValueError: The source has no examples, or no documents, for this model.
    """
    kind, name = config.model["type"], config.data.source["type"]
    source = SOURCES.get(name)
    labelled = getattr(source, "labelled", False) or config.data.columns is not None
    found = Answering if kind == "causal_lm" and labelled else (TASKS | OBJECTIVES)[kind]
    method, needed = (
        ("examples", "labelled examples") if issubclass(found, TaskObjective) else ("documents", "documents")
    )
    if not hasattr(source, method):
        others = ", ".join(other for other in SOURCES.names() if hasattr(SOURCES.get(other), method))
        raise ValueError(f"model.type {kind} reads {needed}: it needs one of the sources {others}, got {name}")
    return found
