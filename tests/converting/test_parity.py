"""Models that public libraries wrote, through `flash-tf convert` and back; `public/` beside this file made them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import flash_tf as ft
from flash_tf.cli import main
from flash_tf.converting import families
from flash_tf.converting.convert import from_public
from tests import tiers
from tests.backends import to_numpy
from tests.numerics import PUBLIC, relative_error

FIXTURES = Path(__file__).with_name("fixtures")
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
pytestmark = pytest.mark.one_backend


@pytest.fixture(scope="module", params=tiers.thinned(NAMES, "flash_pytorch", "gau_alpha", "llama", "mamba"))
def converted(request, tmp_path_factory):
    """The public folder, the preset that the command made of it, and what the public library computes."""
    source, out = FIXTURES / request.param, tmp_path_factory.mktemp(request.param) / "preset"
    assert main(["convert", str(source), str(out)]) == 0
    return source, out, np.load(source / "expected.npz")


def test_every_family_has_a_model_that_its_library_wrote():
    kinds = {json.loads((FIXTURES / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert kinds == set(families.names())


def test_logits_equal_the_public_librarys(converted):
    _, out, want = converted
    model = ft.load(out)
    got = to_numpy(model(want["ids"].astype("int32")))
    assert np.abs(want["logits"]).max() > 0.1 and relative_error(got, want["logits"]) < PUBLIC
    assert np.abs(got - want["logits"]).max() < PUBLIC


@pytest.mark.parametrize("name", tiers.thinned([name for name in NAMES if name != "gau_alpha"], "llama"))
def test_the_greedy_continuation_of_our_stream_equals_the_public_librarys(name):
    model, want = from_public(str(FIXTURES / name)), np.load(FIXTURES / name / "expected.npz")
    prompts, text = want["ids"][:, :5].tolist(), want["greedy"][:, 5:].tolist()
    assert model.generate(prompts, max_new_tokens=len(text[0])) == text


def test_the_way_back_gives_every_tensor_to_the_bit_under_its_public_name(converted, tmp_path):
    source, out, _ = converted
    assert main(["convert", str(out), str(tmp_path / "back"), "--to", "safetensors"]) == 0
    got, want = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", source))
    want.pop("abs_pos_emb.inv_freq", None)  # no weight
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], want[name]) and got[name].shape == want[name].shape for name in want)
    said, was = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "back", source))
    assert {name: said[name] for name in was if name != "dtype"} == {k: v for k, v in was.items() if k != "dtype"}
