"""A checkpoint that is damaged at any place is noticed, and the one before takes its place."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

from flash_tf.training.checkpoints import MARKER, Checkpoints
from tests.training import runs

FILES = ("variables.data-00000-of-00001", "variables.index", MARKER)
PLACES = 21  # in each file


def variables(values):
    """Some variables of several shapes, all made from one number for each."""
    rng = np.random.default_rng(0)
    shapes = {"model/matrix": (37, 23), "model/vector": (129,), "model/scalar": (), "m/model/matrix": (37, 23)}
    return {name: tf.Variable(values + rng.normal(size=shape).astype("float32")) for name, shape in shapes.items()}


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]


def cut_off(data, at):
    return data[:at]


def zeroed(data, at):
    return data[:at] + bytes(len(data[at : at + 16])) + data[at + 16 :]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(str(folder))
    for step in (1, 2):
        checkpoints.save(variables(step), {"step": step, "position": 4 * step, "seed": 0, "loss": 3.5 - step})
    return folder


@pytest.mark.parametrize("damage", [flipped, cut_off, zeroed])
@pytest.mark.parametrize("name", FILES)
def test_damage_at_any_place_is_noticed_or_changes_no_number(saved, tmp_path, name, damage):
    folder, into, noticed = tmp_path / "copy", variables(0), 0
    want = {step: runs.bits({key: v.numpy() for key, v in variables(step).items()}) for step in (1, 2)}
    shutil.copytree(saved, folder)
    whole = (folder / "step-00000002" / name).read_bytes()
    for at in sorted({int(place) for place in np.linspace(0, len(whole) - 1, PLACES)}):
        (folder / "step-00000002" / name).write_bytes(damage(whole, at))
        lines = []
        step = Checkpoints(str(folder), lines.append).restore_newest(into)["step"]
        assert runs.bits({key: v.numpy() for key, v in into.items()}) == want[step], at
        assert len(lines) == (step == 1), lines
        assert all("step-00000002 is damaged: " in line and line.endswith("falling back to step 1") for line in lines)
        assert all("\n" not in line and "{{" not in line for line in lines)
        noticed += step == 1
    assert noticed > PLACES // 2
