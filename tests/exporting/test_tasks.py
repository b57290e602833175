"""Exports of tasks: `predict` says what the run's own `predict` says."""

import numpy as np
import pytest
import tensorflow as tf

from flash_tf.exporting import saved_model
from flash_tf.training.predict import predict
from flash_tf.training.restore import restore
from tests import tiers
from tests.exporting import models
from tests.numerics import FLOAT32, relative_error

TEXTS, SECOND = ["ab cd", "efg hik lmn op", "a"], ["op", "ab ab", "nml k"]
STACK = {"vocabulary_size": models.runs.VOCABULARY, "width": 16, "depth": 1, "position_embedding": "scaled_sin"}
STACK |= {"mixer": models.runs.MIXER}


def run_of(folder, section, **data):
    """A run as `flash-tf train` leaves it, of a task."""
    files = {"type": "example_files", "train": str(folder / "none.jsonl"), "validation": str(folder / "none.jsonl")}
    return restore(str(models.directory(folder, {**STACK, **section}, source=files, **data)))


def exported(run, folder, **options):
    about = saved_model.export(run, str(folder), saved_model.Options(**options), lambda line: None)
    return about, tf.saved_model.load(str(folder))


@pytest.mark.full
def test_the_classes_of_texts_pairs_and_ids_are_those_that_predict_gives(tmp_path):
    run = run_of(tmp_path, {"type": "classifier", "classes": 3}, labels=["x", "y", "z"])
    about, loaded = exported(run, tmp_path / "out")
    assert list(about["signatures"]) == ["predict", "predict_pair"]
    signatures = loaded.signatures
    for signature, examples in (
        ("predict", [{"text": text} for text in TEXTS]),
        ("predict_pair", [{"text": text, "text_b": other} for text, other in zip(TEXTS, SECOND, strict=True)]),
    ):
        want = list(predict(run, [("here", example) for example in examples]))
        given = {key: tf.constant([one[key] for one in examples]) for key in examples[0]}
        got = {name: x.numpy() for name, x in signatures[signature](**given).items()}
        assert relative_error(got["probabilities"], np.array([one["probabilities"] for one in want])) < FLOAT32
        assert [name.decode() for name in got["name"]] == [one["label"] for one in want]
    with pytest.raises(tf.errors.OpError, match="predict_pair needs as many texts as second texts"):
        signatures["predict_pair"](text=tf.constant(["a"]), text_b=tf.constant(["a", "b"]))


@pytest.mark.full
def test_a_regressor_gives_numbers_for_ids(tmp_path):
    run = run_of(tmp_path / "regressor", {"type": "regressor"})
    _, loaded = exported(run, tmp_path / "out", ids_only=True)
    ids = np.array([[2, 5, 6, 1], [2, 7, 1, 0]], "int32")
    want = run.model(ids, padding_mask=ids != run.tokenizer.pad_id).numpy()[:, 0]
    got = loaded.signatures["predict"](ids=tf.constant(ids))["number"].numpy()
    assert relative_error(got, want) < FLOAT32


def test_a_matcher_gives_the_classes_of_pairs_of_texts_and_of_rows_of_ids(tmp_path):
    run = run_of(tmp_path, {"type": "matcher", "classes": 2})
    examples = [{"text": text, "text_b": other} for text, other in zip(TEXTS, SECOND, strict=True)]
    want = np.array([one["probabilities"] for one in predict(run, [("here", example) for example in examples])])
    about, loaded = exported(run, tmp_path / "out")
    assert list(about["signatures"]) == ["predict"]
    got = loaded.signatures["predict"](text=tf.constant(TEXTS), text_b=tf.constant(SECOND))
    assert relative_error(got["probabilities"].numpy(), want) < FLOAT32
    with pytest.raises(tf.errors.OpError, match="predict needs as many texts as second texts"):
        loaded.signatures["predict"](text=tf.constant(["a"]), text_b=tf.constant(["a", "b"]))


LONG = "ab cd  efg hik\nlmn op " * 12
QUESTIONS = [
    {"question": "ab", "context": "cd efg"},
    {"question": "efg hik lmn op ab cd " * 4, "context": LONG},
    {"question": "op", "context": LONG[5:90]},
    {"question": "cd", "context": "\u3000ab\xa0cd\u2028 \u3000efg\x85hik\u205flmn \xa0"},
]


@pytest.mark.parametrize("no_answer", tiers.thinned([True, False], True))
def test_a_model_of_questions_gives_the_answers_of_long_contexts(tmp_path, no_answer):
    examples = [("here", one) for one in QUESTIONS]
    run = run_of(tmp_path, {"type": "span", "no_answer": no_answer})
    if no_answer:  # some questions are then answered, and others not
        scores = sorted(one["score"] for one in predict(run, examples))
        threshold = [f"model.no_answer_threshold={(scores[0] + scores[1]) / 2!r}"]
        run = restore(str(tmp_path / "model"), overrides=threshold)
    want = list(predict(run, examples))
    _, loaded = exported(run, tmp_path / "out")
    given = {key: tf.constant([one[key] for one in QUESTIONS]) for key in QUESTIONS[0]}
    got = {name: x.numpy() for name, x in loaded.signatures["predict"](**given).items()}
    assert [one.decode() for one in got["answer"]] == [one["answer"] for one in want]
    assert relative_error(got["score"], np.array([one["score"] for one in want])) < FLOAT32
    assert [one.decode() for one in got["best_span"]] == [one["best_span"] for one in want]
    assert sum(one["answer"] == "" for one in want) == no_answer and all(one["best_span"] for one in want)
    with pytest.raises(
        ValueError, match="the export of a model of questions reads text: leave --ids-only and --tflite out"
    ):
        exported(run, tmp_path / "ids", ids_only=True)
    with pytest.raises(ValueError, match="a row with a question needs --max-length 16 or more, got 4"):
        exported(run, tmp_path / "short", longest=4)
