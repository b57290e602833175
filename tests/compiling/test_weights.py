"""Weights as plain files: whole or refused."""

import numpy as np
import pytest

from flash_tf.training import weights
from tests.training import runs


@pytest.fixture
def written(tmp_path):
    """A folder with three weights, one of them in two shards, and the weights."""
    rng = np.random.default_rng(0)
    given = {"a/kernel": rng.normal(size=(300, 1000)), "b/scale": np.array(2.0), "c/bias": rng.normal(size=50_000)}
    given = {name: value.astype(np.float32) for name, value in given.items()}
    assert weights.write(str(tmp_path), 7, given.items(), 2**20) == 2
    return tmp_path, given


def shapes(given):
    return {name: value.shape for name, value in given.items()}


def test_weights_come_back_bit_for_bit_from_shards_no_larger_than_asked(written):
    folder, given = written
    files = sorted((folder / "weights").glob("shard-*.npz"))
    assert [file.name for file in files] == ["shard-000.npz", "shard-001.npz"]
    assert all(file.stat().st_size <= 2**20 for file in files)
    assert weights.step(str(folder)) == 7
    assert runs.bits(dict(weights.read(str(folder), shapes(given)))) == runs.bits(given)


def test_new_weights_take_the_place_of_the_old_ones(written):
    folder, given = written
    weights.write(str(folder), 8, [("b/scale", given["b/scale"])], 2**20)
    assert weights.step(str(folder)) == 8
    assert sorted(path.name for path in (folder / "weights").iterdir()) == ["manifest.json", "shard-000.npz"]
    assert [path.name for path in folder.iterdir()] == ["weights"]


def test_weights_of_another_model_are_named(written):
    folder, given = written
    for needed, line in [
        ({**shapes(given), "b/scale": (2,)}, r"b/scale needs shape \(2,\), got \(\)"),
        ({**shapes(given), "d": (2,)}, r"d needs shape \(2,\), got none"),
        (
            {name: shape for name, shape in shapes(given).items() if name != "a/kernel"},
            "a/kernel needs shape none, got",
        ),
    ]:
        with pytest.raises(ValueError, match=f"weights is of another model: {line}"):
            dict(weights.read(str(folder), needed))


def test_a_shard_that_is_damaged_or_missing_is_named(written):
    folder, given = written
    shard = folder / "weights/shard-001.npz"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="shard-001.npz is damaged: copy it again"):
        dict(weights.read(str(folder), shapes(given)))
    shard.unlink()
    with pytest.raises(ValueError, match="shard-001.npz is missing: copy it again"):
        dict(weights.read(str(folder), shapes(given)))


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_manifest_of_weights_is_named(written, text):
    folder, _ = written
    (folder / "weights/manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"weights/manifest.json is damaged: it needs a JSON object with step"):
        weights.step(str(folder))


def test_shards_too_small_for_anything_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a shard of weights needs 65536 bytes or more, got 1000"):
        weights.write(str(tmp_path), 0, [], 1000)
