"""Files of version 0.1.0, from before mixers and kernels took the field's names, give the same outputs today."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import flash_tf as ft
from flash_tf.training.checkpoints import Checkpoints
from tests.numerics import FLOAT32, relative_error

OLD = Path(__file__).parent / "old_files"
WANT = np.load(OLD / "outputs.npz")


def test_a_functional_model_of_quadratic_attention_gives_what_it_gave():
    model = ft.load(str(OLD / "functional.keras"))
    names = [type(layer).__name__ for layer in model.layers]
    assert names[1:4] == ["QuadraticAttention", "MixedChunkAttention", "QuadraticAttention"]
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype("float32")
    assert relative_error(keras.ops.convert_to_numpy(model(x)), WANT["functional"]) < FLOAT32
    assert model.layers[5].block_size == 8  # was `tile`


def test_a_model_whose_mixers_have_old_names_gives_what_it_gave_and_says_the_new_ones():
    model = ft.load(str(OLD / "causal_lm.keras"))
    assert [mixer["type"] for mixer in model.mixer] == ["flash", "gau", "gla"]
    assert model.get_config()["mixer"][2] == {"type": "gla", "heads": 2, "block_size": 4}
    ids = np.arange(22).reshape(2, 11) % 12
    assert relative_error(keras.ops.convert_to_numpy(model(ids)), WANT["causal_lm"]) < FLOAT32


@pytest.mark.one_backend
def test_a_checkpoint_with_gamma_quad_q_is_read_under_an_old_config():
    names = [name for name, _ in tf.train.list_variables(str(OLD / "run/checkpoints/step-00000002/variables"))]
    assert any("gamma_quad_q" in name for name in names)
    model = ft.load(str(OLD / "run"))
    assert model.mixer["type"] == "flash"
    ids = np.arange(3, 35).reshape(1, 32) % 100
    assert relative_error(keras.ops.convert_to_numpy(model(ids)), WANT["run"]) < FLOAT32


@pytest.mark.one_backend
def test_a_checkpoint_is_read_by_the_old_names_of_its_variables(tmp_path):
    old = {"mixer/query_scale/gamma_q_lin": tf.Variable([1.0, 2.0]), "mixer/out/kernel": tf.Variable([3.0])}
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(old, {"step": 1})
    new = {"mixer/query_scale/gamma_lin_q": tf.Variable([0.0, 0.0]), "mixer/out/kernel": tf.Variable([0.0])}
    checkpoints.restore(new, 1)
    assert [list(v.numpy()) for v in new.values()] == [[1.0, 2.0], [3.0]]
