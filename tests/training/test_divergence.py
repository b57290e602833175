"""A loss that is not a number ends the run."""

import re

import numpy as np
import pytest

from tests.training import runs


@pytest.mark.full
def test_a_loss_that_is_not_a_number_stops_the_run_and_overwrites_nothing(tmp_path):
    runs.corpus(tmp_path)
    optimizer = {"learning_rate": 1.0e18, "warmup_steps": 0, "schedule": "inverse_sqrt"}
    train = {"steps": 50, "steps_per_loop": 1, "checkpoint_every": 1, "keep": 50}
    path = runs.write(tmp_path, model={"depth": 1}, optimizer=optimizer, train=train)
    command = ["train", path, "--model-dir", tmp_path / "model"]
    status, out, err = runs.command(tmp_path, *command)
    assert (status, out) == (1, "")
    line = err.splitlines()[-1]
    found = re.match(
        r"flash-tf: .* is not (?:a number at|finite after) step (\d+); "
        r"the last good checkpoint is of step (\d+); nothing was overwritten\. "
        r"Try another --model-dir with a lower optimizer\.learning_rate, ",
        line,
    )
    assert found, line
    assert "train.precision" not in line and "optimizer.clip" in line  # float32 it is, and nothing is clipped
    step, good = map(int, found.groups())
    assert good == step - 1 and len(runs.losses(tmp_path / "model")) in (good, step)
    assert all(np.isfinite(x).all() for x in runs.state(tmp_path / "model").values())
    checkpoints = sorted(path.name for path in (tmp_path / "model/checkpoints").iterdir())
    assert checkpoints == [f"step-{number:08d}" for number in range(1, step)]
    kept = runs.bits(runs.state(tmp_path / "model"))

    status, out, err = runs.command(tmp_path, *command)
    assert (status, out) == (1, "")
    assert f"step {step}; the last good checkpoint is of step {good}" in err.splitlines()[-1]
    assert runs.bits(runs.state(tmp_path / "model")) == kept
