"""Presets and `.keras` files, loaded by new processes on each backend."""

import json
import os
import pickle
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest

import flash_tf
from flash_tf import owned_files
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.layers import GLU, MixedChunkAttention, ResidualBlock
from flash_tf.models import MODELS
from flash_tf.models.language_model import LanguageModel
from tests import tiers
from tests.backends import to_numpy
from tests.exporting import models
from tests.numerics import FLOAT32, INT8, relative_error
from tests.training import runs

SECTIONS = models.sections()
UNIT = {"key_dim": 8, "chunk_size": 4}
IDS = np.random.default_rng(2).integers(4, 100, (2, 21)).astype("int32")
READ = """
import pickle, sys
import keras
from flash_tf.models.language_model import LanguageModel
folders, ids = pickle.load(open(sys.argv[1], "rb"))
found = {"backend": keras.backend.backend()}
for name, folder in folders.items():
    for kind, model in (
        ("preset", LanguageModel.from_preset(folder)),
        ("keras", keras.saving.load_model(folder + "/whole.keras")),
    ):
        found[name, kind] = keras.ops.convert_to_numpy(model(ids))
pickle.dump(found, open(sys.argv[2], "wb"))
"""


def model_of(name):
    """A model with weights that say something."""
    model = MODELS.build({"max_length": 40, **SECTIONS[name]} if name.endswith("transformer") else SECTIONS[name])
    model.build()
    rng = np.random.default_rng(6)
    for weight in model.trainable_variables:
        weight.assign(np.round(to_numpy(weight.value)) + 0.3 * rng.normal(size=weight.shape))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every model by name, and the folders in which each is saved, both ways."""
    folder, found = tmp_path_factory.mktemp("presets"), {}
    for name in SECTIONS:
        model = model_of(name)
        model.save_to_preset(str(folder / name))
        model.save(folder / name / "whole.keras")
        found[name] = model
    for mode in ("int8", "int4"):
        model = quantized(model_of("causal-flash"), mode)
        model.save_to_preset(str(folder / mode))
        model.save(folder / mode / "whole.keras")
        found[mode] = model
    return found, folder


@pytest.mark.full
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_every_model_loads_in_a_new_process_on_each_backend_with_equal_outputs(saved, backend, tmp_path):
    made, folder = saved
    files = [tmp_path / "asked.pickle", tmp_path / "found.pickle"]
    files[0].write_bytes(pickle.dumps(({name: str(folder / name) for name in made}, IDS)))
    environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", READ, *files], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = pickle.loads(files[1].read_bytes())
    assert found.pop("backend") == backend
    assert {name for name, _ in found} == {*SECTIONS, "int8", "int4"} and len(found) == 2 * len(made)
    for (name, kind), got in found.items():
        assert relative_error(got, to_numpy(made[name](IDS))) < FLOAT32, (name, kind)


def test_a_preset_brings_its_tokenizer_and_takes_other_options(tmp_path):
    directory = models.directory(tmp_path, SECTIONS["causal-flash"])
    model = model_of("causal-flash")
    model.tokenizer = Tokenizer.load(str(directory / "tokenizer.model"))
    model.save_to_preset(str(tmp_path / "preset"))
    names = [owned_files.MANIFEST, "config.json", "model.weights.h5", "tokenizer.model"]
    assert sorted(path.name for path in (tmp_path / "preset").iterdir()) == names
    again = LanguageModel.from_preset(str(tmp_path / "preset"))
    assert again.tokenizer.fingerprint == model.tokenizer.fingerprint
    assert again.generate("ab cde", max_new_tokens=3) == model.generate("ab cde", max_new_tokens=3)
    half = type(model).from_preset(str(tmp_path / "preset"), dtype="bfloat16", dropout=0.1)
    assert half.compute_dtype == "bfloat16" and half.dropout == 0.1
    model.tokenizer = None
    model.save_to_preset(str(tmp_path / "preset"))
    assert sorted(path.name for path in (tmp_path / "preset").iterdir()) == names[:3]


def test_no_weight_is_drawn_at_random_before_it_is_read_and_dropout_draws_as_ever(tmp_path, monkeypatch):
    model = model_of("causal-flash")
    model.save_to_preset(str(tmp_path / "preset"))
    with monkeypatch.context() as patch:
        patch.setattr(keras.initializers.RandomNormal, "__call__", None)
        again = LanguageModel.from_preset(str(tmp_path / "preset"), dropout=0.5)
    assert relative_error(to_numpy(again(IDS)), to_numpy(model(IDS))) < FLOAT32
    outputs = [to_numpy(again(IDS, training=True)) for _ in range(2)]
    assert relative_error(outputs[0], outputs[1]) > 0.1


def test_a_preset_takes_the_place_of_one_from_before_manifests_and_of_no_other_file(tmp_path):
    model = model_of("causal-flash")
    model.save_to_preset(str(tmp_path))
    (tmp_path / owned_files.MANIFEST).unlink()
    model.save_to_preset(str(tmp_path))
    (tmp_path / "README.md").write_text("mine")
    before = runs.contents(tmp_path)
    with pytest.raises(ValueError, match="holds README.md, which save_to_preset did not write"):
        model.save_to_preset(str(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.model").write_text("mine")
    with pytest.raises(ValueError, match="holds tokenizer.model, which save_to_preset did not write"):
        model.save_to_preset(str(tmp_path / "other"))
    assert runs.contents(tmp_path) == before | {"other/tokenizer.model": b"mine"}


@pytest.mark.parametrize("mode", tiers.thinned(["int8", "int4"], "int8"))
def test_a_quantized_model_is_the_same_after_two_saves_and_loads(mode, tmp_path):
    model = quantized(model_of("causal-flash"), mode)
    want = to_numpy(model(IDS))
    for i, kind in enumerate(("whole.keras", "preset")):
        (keras.Model.save if kind == "whole.keras" else type(model).save_to_preset)(model, tmp_path / kind)
        model = flash_tf.load(tmp_path / kind)
        assert modes(model) == {mode} and np.array_equal(to_numpy(model(IDS)), want), i
    with pytest.raises(ValueError, match="has a quantized model: it needs its own dtype, got dtype='bfloat16'"):
        type(model).from_preset(str(tmp_path / "preset"), dtype="bfloat16")


def test_a_quantized_model_of_reduced_precision_adds_its_embeddings():
    options = {"token_types": 2, "position_embedding": "learned", "max_length": 32, "dtype": "mixed_bfloat16"}
    model = flash_tf.models.CausalLM(64, width=32, depth=1, mixer={"type": "self_attention", "heads": 2}, **options)
    model.build()
    want = to_numpy(model(IDS % 64)).astype("float32")
    model.quantize("int8")
    assert relative_error(to_numpy(model(IDS % 64)).astype("float32"), want) < INT8


def functional():
    inputs = keras.Input((None, 16))
    x = ResidualBlock(MixedChunkAttention(**UNIT))(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(GLU()(x)))


def sequential():
    return keras.Sequential([keras.Input((None, 16)), ResidualBlock(MixedChunkAttention(**UNIT)), GLU()])


@pytest.mark.full
@pytest.mark.parametrize("make", [functional, sequential])
def test_quantized_layers_of_a_model_of_keras_are_the_same_after_two_saves_and_loads(make, tmp_path):
    model = make()
    model(np.zeros((1, 4, 16), "float32"))
    quantized(model, "int8")
    x = np.random.default_rng(3).normal(size=(2, 11, 16)).astype("float32")
    want = to_numpy(model(x))
    for name in ("once.keras", "twice.keras"):
        model.save(tmp_path / name)
        model = keras.saving.load_model(tmp_path / name)
        assert modes(model) == {"int8"} and np.array_equal(to_numpy(model(x)), want)


def quantized(model, mode):
    with warnings.catch_warnings(action="ignore"):  # Keras names each layer that stays as it is
        model.quantize(mode)
    return model


def modes(model):
    """The quantization modes of all dense layers."""
    return {layer.quantization_mode for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dense)}


def test_a_bad_preset_is_named(tmp_path):
    with pytest.raises(ValueError, match="is no preset: it has no config.json"):
        LanguageModel.from_preset(str(tmp_path))
    model_of("causal-flash").save_to_preset(str(tmp_path))
    with pytest.raises(ValueError, match="has a CausalLM, not a MaskedLM"):
        MODELS.get("masked_lm").from_preset(str(tmp_path))
    with pytest.raises(ValueError, match="model.weights.h5 does not fit width=8: .*in_projection"):
        LanguageModel.from_preset(str(tmp_path), width=8)
    with pytest.raises(ValueError, match="CausalLM has no option 'widht'; did you mean 'width'"):
        LanguageModel.from_preset(str(tmp_path), widht=8)
    config = json.loads((tmp_path / "config.json").read_text())
    other = {**config, "config": {**config["config"], "width": 8}}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="model.weights.h5 is damaged, or does not belong to.*in_projection"):
        LanguageModel.from_preset(str(tmp_path))
    for damaged in ("{", json.dumps({"class_name": "CausalLM"})):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match="config.json is not the config of a model"):
            LanguageModel.from_preset(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.weights.h5").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="model.weights.h5 is damaged"):
        LanguageModel.from_preset(str(tmp_path))
