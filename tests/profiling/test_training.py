"""A profile of some steps of a run does not change the run."""

import json

import pytest
import tensorflow as tf

from flash_tf import config
from flash_tf.training import actions, progress
from tests.profiling.test_profile import slow_batches
from tests.training import runs

WINDOW = "profile={start: 4, steps: 3}"
AT_ONCE = "train.steps_per_loop=4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    runs.corpus(folder)
    runs.write(folder, model={"depth": 1}, train={"checkpoint_every": 5}, evaluation={"every": None})
    return folder


def profiles(model_dir):
    return sorted(model_dir.glob("profile/plugins/profile/*/*.xplane.pb"))


@pytest.mark.full
def test_a_run_with_a_window_has_the_same_losses_to_the_bit_and_says_what_a_step_costs(folder):
    path = str(folder / "config.yaml")
    plain = runs.train(path, folder / "plain", AT_ONCE)
    shown = runs.train(path, folder / "profiled", AT_ONCE, WINDOW)
    assert runs.losses(folder / "profiled") == runs.losses(folder / "plain")
    assert runs.bits(runs.state(folder / "profiled")) == runs.bits(runs.state(folder / "plain"))
    assert "profile of steps 4 to 6: " in shown and "ms a step" in shown and "profile of" not in plain
    # The loop before the captured steps ends there. Loops of captured steps have one step.
    assert all(f"step {n}/8" in shown for n in (3, 4, 5, 6, 8))
    result = json.loads((folder / "profiled/profile/latency.json").read_text())
    assert [step["step"] for step in result["steps"]] == [4, 5, 6]
    assert len(profiles(folder / "profiled")) == 1 and not profiles(folder / "plain")


@pytest.mark.full
def test_a_run_that_is_stopped_in_its_window_profiles_the_rest_of_it_when_it_goes_on(folder):
    path, model_dir = str(folder / "config.yaml"), folder / "stopped"
    shown = runs.train(path, model_dir, WINDOW, stop_after=4)
    assert "profile of" not in shown and not profiles(model_dir)
    shown = runs.train(path, model_dir, WINDOW)
    assert "going on from step 4" in shown and "profile of steps 5 to 6: " in shown
    assert len(runs.losses(model_dir)) == 8


def test_loops_end_where_a_window_begins_and_are_of_one_step_in_it(tmp_path):
    window = config.ProfileConfig(start=4, steps=3)
    for done, steps in ((0, 3), (2, 1), (3, 1), (5, 1), (6, 100), (90, 100)):
        action = actions.Profiler(window, None, tf.Variable(done), str(tmp_path), None)
        assert action.steps_per_loop(done, 100) == steps
    with actions.Profiler(window, None, tf.Variable(6), str(tmp_path / "later"), None):
        assert not (tmp_path / "later").exists()  # the run is past the steps to capture
    assert actions.Profiler(None, None, tf.Variable(3), str(tmp_path), None).steps_per_loop(3, 100) == 100


def test_a_window_must_lie_between_evaluations_and_within_the_run(folder):
    path = str(folder / "config.yaml")
    with pytest.raises(ValueError, match="profile's steps 6 to 9 must not go beyond the last, train.steps 8"):
        config.load(path, ["profile={start: 6, steps: 4}"])
    with pytest.raises(ValueError, match="profile's steps 4 to 6 must not go beyond an evaluation, one every 4 steps"):
        config.load(path, [WINDOW, "evaluation.every=4"])
    for option in ("start", "steps"):
        with pytest.raises(ValueError, match=f"profile.{option} must be positive, got 0"):
            config.load(path, [f"profile.{option}=0"])
    assert config.load(path, ["profile={start: 5, steps: 4}", "evaluation.every=4"]).profile.last == 8


def waits(shown):
    return [line for line in shown.splitlines() if "waiting for input" in line]


@pytest.mark.full
def test_a_run_that_waits_for_input_says_so_and_how_much(folder, monkeypatch):
    path = str(folder / "config.yaml")
    with slow_batches(monkeypatch):
        shown = waits(runs.train(path, folder / "slow", AT_ONCE))
    assert shown and int(shown[-1].partition("waiting for input ")[2].partition("%")[0]) > 50


def test_a_little_waiting_is_not_worth_a_word():
    record = {"step": 1, "loss": 1.0, "learning_rate": 0.1, "gradient_norm": 1.0}
    said = {"steps": 2, "tokens_per_second": 1.0, "mfu": None, "left": 1.0}
    assert not any("waiting" in part for part in progress.training_parts(record, waiting=progress.WAITING, **said))
    assert "waiting for input 11%" in progress.training_parts(record, waiting=0.11, **said)
