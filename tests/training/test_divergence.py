"""A loss that is not a number ends the run."""

import re

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
        r"flash-tf: the loss or its gradient is not a number at step (\d+); "
        r"the last good checkpoint is of step (\d+); nothing was overwritten\. "
        r"Try another --model-dir with a lower optimizer\.learning_rate, ",
        line,
    )
    assert found, line
    step, good = map(int, found.groups())
    assert good == step - 1 == len(runs.losses(tmp_path / "model"))
    checkpoints = sorted(path.name for path in (tmp_path / "model/checkpoints").iterdir())
    assert checkpoints == [f"step-{number:08d}" for number in range(1, step)]
    kept = runs.bits(runs.state(tmp_path / "model"))

    status, out, err = runs.command(tmp_path, *command)
    assert (status, out) == (1, "")
    assert f"not a number at step {step}; the last good checkpoint is of step {good}" in err.splitlines()[-1]
    assert runs.bits(runs.state(tmp_path / "model")) == kept
