"""What `import flash_tf as ft` gives."""

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys

import keras
import numpy as np
import pytest

import flash_tf as ft
import flash_tf.generation
from flash_tf.models.language_model import LanguageModel
from tests.exporting import models

CAUSAL = models.sections()["causal-flash"]
INSTALL = "pip install 'flash-tf[tensorflow]'"
PROMPTS = [[5, 17, 3], [8]]
WITHOUT_TENSORFLOW = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "tensorflow_text", "sentencepiece", "orbit", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def in_process(code, *arguments, **environment):
    """What a new process prints, on standard output and on the other, and its exit status."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    return done.stdout, done.stderr, done.returncode


def assert_public(namespace, names):
    assert sorted(dir(namespace)) == sorted(namespace.__all__) == sorted(names)
    assert all(hasattr(namespace, name) for name in names)


def test_each_namespace_lists_what_is_public_and_nothing_else():
    assert_public(ft, ["__version__", "layers", "load", "models", "samplers"])
    assert_public(
        ft.models, ["Backbone", "CausalLM", "Classifier", "MaskedLM", "Matcher", "Regressor", "SpanExtractor"]
    )
    assert_public(ft.samplers, ["GREEDY", "BeamSearch", "Sampler"])
    assert_public(ft.layers, ft.layers.__all__)
    assert all(issubclass(getattr(ft.layers, name), keras.layers.Layer) for name in dir(ft.layers))
    with pytest.raises(AttributeError, match="no attribute 'layer'; it has __version__, layers, load"):
        ft.layer  # noqa: B018


def functions():
    """Every public function and method of the modules behind the API, by name."""
    for package in (ft.layers, ft.models, flash_tf.generation):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for scope in (module, *filter(inspect.isclass, vars(module).values())):
                for name, member in vars(scope).items():
                    function = getattr(member, "fget", getattr(member, "__func__", member))
                    public = name == "__call__" or not name.startswith("_")
                    if public and inspect.isfunction(function) and function.__module__ == found.name:
                        yield f"{found.name}.{function.__qualname__}", function


def untyped(function):
    """The parameters without a type, `self` and options passed on apart, and `return`."""
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in named if p.annotation is p.empty and p.name not in ("self", "cls")]
    return missing + ["return"] * (signature.return_annotation is signature.empty)


def test_every_call_and_public_function_is_typed():
    found = dict(functions())
    assert len(found) > 200
    known = {"flash_tf.layers.mixers.flash.MixedChunkAttention.call", "flash_tf.models.causal_lm.CausalLM.stream"}
    assert known < set(found)
    assert {name: missing for name, function in found.items() if (missing := untyped(function))} == {}


def test_the_package_imports_nothing_heavy_before_a_part_is_used():
    code = "import sys, flash_tf; print(dir(flash_tf), {'keras', 'numpy', 'tensorflow'} & set(sys.modules))"
    assert in_process(code)[0] == f"{dir(ft)} set()\n"


@pytest.mark.parametrize("command", [pytest.param("list", marks=pytest.mark.full), "describe mlm_c4/flash --json"])
def test_commands_that_look_at_configs_alone_run_without_tensorflow(command):
    hidden = "import importlib.util as util; find = util.find_spec\n"
    hidden += "util.find_spec = lambda name, *rest: None if name == 'tensorflow' else find(name, *rest)\n"
    code = WITHOUT_TENSORFLOW + hidden + "from flash_tf.cli import main; sys.exit(main(sys.argv[1:]))"
    out, err, status = in_process(code, *command.split())
    assert (status, out.count("FLASH") > 1 or '"parameters":' in out) == (0, True), err
    assert err.count("'tensorflow'") <= 1  # `describe` says once what training lacks


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The model of a run, and the folder with the run, a preset and a `.keras` file."""
    folder = tmp_path_factory.mktemp("saved")
    run = models.directory(folder, CAUSAL)
    model = ft.load(run)
    model.save_to_preset(str(folder / "preset"))
    model.save(folder / "whole.keras")
    return model, {"run": run, "preset": folder / "preset", "keras": folder / "whole.keras"}


@pytest.mark.parametrize("kind", ["run", "preset", "keras"])
def test_load_brings_the_weights_and_the_tokenizer(saved, kind):
    model, paths = saved
    again = ft.load(paths[kind])
    assert type(again) is ft.models.CausalLM
    assert again.tokenizer.fingerprint == model.tokenizer.fingerprint
    ids = np.random.default_rng(2).integers(4, 100, (2, 21)).astype("int32")
    np.testing.assert_array_equal(again(ids), model(ids))
    assert again.generate("ab cde", 5) == model.generate("ab cde", 5)


def test_a_model_without_a_tokenizer_has_none_after_loading(saved, tmp_path):
    model = LanguageModel.from_preset(str(saved[1]["preset"]))
    model.tokenizer = None
    model.save(tmp_path / "model.keras")
    assert ft.load(tmp_path / "model.keras").tokenizer is None
    x = keras.Input((None, 8))
    keras.Model(x, ft.layers.ScaleNorm()(x)).save(tmp_path / "functional.keras")
    assert ft.load(tmp_path / "functional.keras").tokenizer is None


@pytest.mark.full
def test_pieces_of_a_stream_join_to_what_generate_adds(saved):
    model, _ = saved
    text = model.tokenizer.decode(model.tokenize(["ab cde"])[0])
    sampler = ft.samplers.Sampler(top_k=5)
    assert text + "".join(model.stream("ab cde", 12, sampler, 3)) == model.generate("ab cde", 12, sampler, 3)
    rows = zip(*model.stream(["ab cde", "e"], 12, sampler, 3), strict=True)
    joined = ["".join(piece or "" for piece in row) for row in rows]
    assert [a + b for a, b in zip([text, "e"], joined, strict=True)] == model.generate(["ab cde", "e"], 12, sampler, 3)


def test_a_stream_waits_where_the_next_token_may_change_the_text():
    class Bytes:
        eos_id = 0

        def decode(self, ids):
            return bytes(ids).decode("utf-8", "replace")

    model = ft.models.CausalLM(256, width=8, depth=1, mixer={"type": "gla", "heads": 1})
    model.tokenizer = Bytes()
    found = model._pieces([b"a", b"b"], [[ord(" "), 0xC3], [ord("b"), 0xA9], [ord("\n"), None]])
    assert list(found) == [["", ""], [" b", "é"], ["", None], ["\n", None]]


@pytest.mark.full
def test_a_run_is_loaded_without_data_optimizer_or_strategy(saved):
    code = (
        "import sys, flash_tf as ft\n"
        "print(ft.load(sys.argv[1]).name)\n"
        "print(sorted({'orbit', 'tf_keras', 'tensorflow_datasets', 'flash_tf.training.loop',\n"
        "              'flash_tf.training.optimizer', 'flash_tf.data.stream'} & set(sys.modules)))"
    )
    out, err, status = in_process(code, saved[1]["run"], KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    assert status == 0, err
    assert out.split("\n")[:2] == ["causal_lm", "[]"]


@pytest.mark.parametrize("name", ["nothing", "nothing.keras"])
def test_a_path_without_a_model_is_named(name, tmp_path):
    with pytest.raises(ValueError, match=name):
        ft.load(tmp_path / name)


@pytest.mark.full
def test_layers_models_and_load_need_no_tensorflow(saved):
    code = WITHOUT_TENSORFLOW + (
        "import numpy as np, warnings, flash_tf as ft\n"
        "layer = ft.layers.Retention(heads=2)\n"
        "assert layer(np.ones((2, 5, 16), 'float32')).shape == (2, 5, 16)\n"
        "for path in sys.argv[2:]:\n"
        "    with warnings.catch_warnings(record=True) as caught:\n"
        "        model = ft.load(path)\n"
        "    assert model.tokenizer is None, path\n"
        "    print(model.generate([[5, 17, 3], [8]], 2), ['flash-tf[tensorflow]' in str(w.message) for w in caught])\n"
        "try: ft.load(sys.argv[1])\n"
        "except ImportError as error: print(error)\n"
        "assert not {'tensorflow', 'sentencepiece'} & set(sys.modules)"
    )
    model, paths = saved
    out, err, status = in_process(code, *paths.values(), KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[:2] == [f"{model.generate(PROMPTS, 2)} [True]"] * 2
    assert lines[2:] == [f"{paths['run']} is a training run, and TensorFlow reads its checkpoints: {INSTALL}"]


@pytest.mark.parametrize("part", ["layers", "models", "samplers"])
def test_a_backend_that_is_not_there_is_named_in_one_line(part):
    code = WITHOUT_TENSORFLOW + f"import flash_tf.{part}"
    _, err, status = in_process(code, KERAS_BACKEND="tensorflow")
    assert status == 1
    assert err.splitlines()[-1].startswith("ImportError: Keras cannot import the backend that KERAS_BACKEND names")
    assert f"{INSTALL}, or pip install 'flash-tf[jax]'" in err.splitlines()[-1]


@pytest.mark.parametrize("command", ["train quickstart", "generate run --prompt a", "list", "plot run"])
def test_a_command_that_lacks_tensorflow_names_the_extra_in_one_line(command):
    code = WITHOUT_TENSORFLOW + "from flash_tf import cli\nsys.exit(cli.main(sys.argv[1:]))"
    out, err, status = in_process(code, *command.split())
    assert (out, status) == ("", 1)
    assert len(err.splitlines()) == 1 and err.endswith(f"{INSTALL}\n"), err
