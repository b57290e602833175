"""TensorFlow Lite files, run by its interpreter, against the Python model."""

import re

import numpy as np
import pytest
import tensorflow as tf

from flash_tf.exporting import lite, saved_model
from flash_tf.models.masked_lm import MaskedLM
from tests import tiers
from tests.backends import to_numpy
from tests.exporting import models
from tests.numerics import FLOAT32, relative_error

SECTIONS = models.sections()
IDS = np.random.default_rng(1).integers(4, 100, (1, 21)).astype("int32")


NAMES = [
    *("masked-flash", "causal-flash", "causal-flash_quad", "causal-transformer", "causal-transformer_ls"),
    *("masked-linear_attention", "causal-linear_attention", "causal-retention", "causal-gla"),
]


@pytest.fixture(scope="module", params=tiers.thinned(NAMES, "causal-flash"))
def converted(request, tmp_path_factory):
    """A model and the interpreter of its file."""
    folder = tmp_path_factory.mktemp("lite")
    run = models.restored(models.directory(folder, SECTIONS[request.param]))
    file = lite.convert(saved_model.served(run, saved_model.Options(new_tokens=models.NEW, top_k=3)))
    return run.model, tf.lite.Interpreter(model_content=file)


def test_logits_of_texts_of_any_length_are_those_of_python(converted):
    model, interpreter = converted
    logits = interpreter.get_signature_runner("logits")
    for n in (1, 8, 21):
        assert relative_error(logits(ids=IDS[:, :n])["logits"], to_numpy(model(IDS[:, :n]))) < FLOAT32


def test_single_steps_from_zeros_give_the_logits_of_the_whole(converted):
    model, interpreter = converted
    assert list(interpreter.get_signature_list()) == (["decode_step", "logits"] if model.causal else ["logits"])
    if not model.causal:
        return
    step, want = interpreter.get_signature_runner("decode_step"), to_numpy(model(IDS))
    details = step.get_input_details()
    state = {name: np.zeros(x["shape"], x["dtype"]) for name, x in details.items() if name != "token"}
    for at in range(IDS.shape[1]):
        logits, state = (lambda found: (found.pop("logits"), found))(step(token=IDS[:, at], **state))
        assert relative_error(logits, want[:, at]) < FLOAT32, at


class Lacking(MaskedLM):
    """A model with an operator that TensorFlow Lite has not."""

    def head(self, x):
        x = super().head(x)
        return x + tf.cast(tf.bitwise.bitwise_and(tf.cast(x, tf.int32), 1), x.dtype)


def test_an_operator_that_is_missing_is_named(tmp_path):
    run = models.restored(models.directory(tmp_path, SECTIONS["masked-flash_quad"]))
    run.model.__class__ = Lacking
    with pytest.raises(
        ValueError, match=re.escape("TensorFlow Lite has no operator BitwiseAnd, which this model needs")
    ):
        lite.convert(saved_model.served(run, saved_model.Options()))
