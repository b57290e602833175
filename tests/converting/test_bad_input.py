"""What `flash-tf convert` cannot convert: one line says why, and nothing is written."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import flash_tf as ft
from flash_tf.cli import main
from flash_tf.converting import families
from flash_tf.converting.convert import family_of

FIXTURES = Path(__file__).with_name("fixtures")
pytestmark = pytest.mark.one_backend


@pytest.fixture
def refused(tmp_path, capfd):
    """`refused(source, *options)`: the line of a command that fails and leaves no folder."""

    def refused(source, *options):
        assert main(["convert", str(source), str(tmp_path / "out"), *options]) == 1
        assert not (tmp_path / "out").exists()
        line = capfd.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("flash-tf: ")
        return line

    return refused


def changed(tmp_path, name="llama", config=None, tensors=None):
    """A copy of a public folder with other options, and with its tensors passed through a function."""
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder)
    said = json.loads((folder / "config.json").read_text())
    said = {k: v for k, v in {**said, **(config or {})}.items() if v != "missing"}
    (folder / "config.json").write_text(json.dumps(said))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("name", "config", "message"), [
    ("llama", {"model_type": "bart"}, "no architecture is called 'bart'; the known ones are "),
    ("llama", {"hidden_size": "missing"}, "needs hidden_size, which is not there"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
     "rope scaling is not supported: rope_type must be 'default', got 'linear'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "must be 'default', got 'llama3'"),
    ("llama", {"head_dim": 16}, "head_dim must be hidden_size / num_attention_heads, 8, got 16"),
    ("llama", {"hidden_act": "mish"}, "hidden_act must be one of silu, gelu, gelu_new, relu, got 'mish'"),
    ("llama", {"num_hidden_layers": "2"}, "config.json: depth must be int, got '2' (str)"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True},
     "scale_attn_by_inverse_layer_idx is not supported: it must be false, got True"),
])  # fmt: skip
def test_an_option_that_is_not_ours_is_named(name, config, message, tmp_path, refused):
    assert message in refused(changed(tmp_path, name, config))


def renamed(tensors):
    return {name.replace("layers.1.mlp.up_proj", "layers.1.mlp.down"): x for name, x in tensors.items()}


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(("tensors", "message"), [
    (renamed, "the model needs model.layers.1.mlp.up_proj.weight, which is not there; "
     "it has no place for model.layers.1.mlp.down.weight"),
    (lambda found: {**found, NORM: np.ones(31, "float32")}, f"needs {NORM} of shape [32], got [31]"),
    (lambda found: {k: v for k, v in found.items() if "mlp" not in k}, "gate_proj.weight and 5 more, which is not"),
])  # fmt: skip
def test_missing_additional_and_misshaped_tensors_are_named(tensors, message, tmp_path, refused):
    assert message in refused(changed(tmp_path, tensors=tensors))


def test_a_head_that_is_not_the_embedding_is_refused_where_the_config_ties_them(tmp_path, refused):
    folder = changed(tmp_path, config={"tie_word_embeddings": True})
    assert "lm_head.weight must equal model.embed_tokens.weight" in refused(folder)


def test_folders_that_are_no_model_are_named(tmp_path, refused):
    assert "has no config.json: convert needs a public model, a preset or a run" in refused(tmp_path)
    folder = changed(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no model.safetensors: weights of other kinds, as pytorch_model.bin, are not read" in refused(folder)
    (folder / "model.safetensors").write_bytes(b"{")
    assert "model.safetensors is damaged or missing" in refused(folder)


@pytest.mark.parametrize(("options", "message"), [
    ({"mixer": {"type": "linear_attention"}}, "has the layers of this model, linear_attention: there are"),
    ({"mixer": {"type": "flash", "key_dim": 8, "chunk_size": 4}}, "the nearest, flash_pytorch, needs head_norm"),
    ({"mixer": {"type": "self_attention", "heads": 2}, "feedforward": {"type": "glu", "activation": "silu"},
      "norm": "rms_norm", "position_embedding": None}, "the nearest, llama, needs head_bias False, got True"),
])  # fmt: skip
def test_a_model_that_no_public_library_computes_is_told_apart(options, message, tmp_path, refused):
    ft.models.CausalLM(50, width=16, depth=1, **options).save_to_preset(tmp_path / "preset")
    assert message in refused(tmp_path / "preset", "--to", "safetensors")


def test_a_head_without_a_prefix_and_with_masks_of_old_files_is_read(tmp_path):
    def old(found):
        found = {name.removeprefix("transformer."): x for name, x in found.items()}
        return {**found, "h.0.attn.bias": np.ones((1, 1, 40, 40), "float32"), "lm_head.weight": found["wte.weight"]}

    assert main(["convert", str(changed(tmp_path, "gpt2", tensors=old)), str(tmp_path / "out")]) == 0


def test_several_files_with_an_index_are_read_in_bfloat16(tmp_path):
    from ml_dtypes import bfloat16

    folder = changed(tmp_path)
    found = {name: x.astype(bfloat16) for name, x in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(found)}
    for file in set(files.values()):
        save_file({name: x for name, x in found.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 0
    table = ft.load(tmp_path / "out").embedding.embeddings
    assert np.array_equal(np.asarray(table), found["model.embed_tokens.weight"].astype("float32"))


SAME = {  # of a family: options of its model that change no function
    "implementation": ("mamba", lambda options: options["mixer"].update(dt_rank=None, implementation="xla")),
    "kv_heads": ("gpt2", lambda options: options["mixer"].update(kv_heads=options["mixer"]["heads"])),
    "attention_dropout": ("llama", lambda options: options["mixer"].update(attention_dropout=0.1)),
    "swish": ("llama", lambda options: options["feedforward"].update(activation="swish")),
}


@pytest.mark.parametrize("name", SAME)
def test_an_option_that_changes_no_function_does_not_tell_a_model_apart(name):
    known, change = SAME[name]
    family = families.get(known)
    options = copy.deepcopy(family.options(json.loads((FIXTURES / known / "config.json").read_text())))
    change(options)
    model = family.MODEL(**options)
    model.build()
    assert family_of(model)[0] == known
