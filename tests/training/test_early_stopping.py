"""A run ends after `evaluation.patience` evaluations without a better one, and resumes to the bit before it."""

import pytest

from flash_tf import config
from flash_tf.pictures import records
from flash_tf.training.extend import extended
from tests.training import runs

STILL = {"learning_rate": 1e-30, "warmup_steps": 0}  # no weight changes, so no evaluation is better than the first


def write(folder, **sections):
    runs.corpus(folder)
    evaluation = {"every": 2, "patience": 2}
    train = {"steps": 20, "checkpoint_every": 1}
    return runs.write(folder, model=runs.SMALLEST, evaluation=evaluation, train=train, **sections)


def evaluated(folder):
    return [one["step"] for one in runs.records(folder, "evaluations.jsonl")]


def test_a_run_without_a_better_evaluation_stops_and_stays_stopped(tmp_path):
    path, called = write(tmp_path, optimizer=STILL), {"train": [], "validation": []}

    def call(kind, found):
        called[kind] += map(dict, found)
        for record in found:
            record.clear()  # they are copies

    shown = runs.train(path, tmp_path / "run", callback=call)
    files = {"train": "metrics.jsonl", "validation": "evaluations.jsonl"}
    assert called == {kind: runs.records(tmp_path / "run", name) for kind, name in files.items()}
    assert evaluated(tmp_path / "run") == [2, 4, 6] and len(runs.records(tmp_path / "run")) == 6
    assert "stopped early: no better loss in 2 evaluations in a row" in shown
    again = runs.train(path, tmp_path / "run")
    assert "stopped early" in again and evaluated(tmp_path / "run") == [2, 4, 6]
    (run,) = records.read_all([str(tmp_path / "run")])
    assert run.stopped_early
    stopped, overrides = config.load(path), ["evaluation.patience=5"]
    with pytest.raises(
        ValueError, match="run stopped early, after 2 evaluations without a better loss: it goes on with"
    ):
        extended(stopped, str(tmp_path / "run"), 30, False, print)
    patient = config.load(path, overrides)
    assert extended(patient, str(tmp_path / "run"), 30, False, print).train.steps == 30


@pytest.mark.full
@pytest.mark.parametrize("after", [3, 4, 5])
def test_a_resumed_run_counts_on_and_stops_at_the_same_step_with_the_same_bits(tmp_path, after):
    path = write(tmp_path, optimizer=STILL)
    runs.in_child(runs.train, path, tmp_path / "one")
    runs.in_child(runs.train, path, tmp_path / "two", stop_after=after)
    assert len(runs.records(tmp_path / "two")) == after
    runs.in_child(runs.train, path, tmp_path / "two")
    runs.same(tmp_path / "one", tmp_path / "two")
    assert evaluated(tmp_path / "two") == [2, 4, 6]


@pytest.mark.full
def test_a_run_whose_evaluations_improve_goes_on(tmp_path):
    path = write(tmp_path)
    runs.train(path, tmp_path / "run", "train.steps=10", "evaluation.patience=1")
    losses = [one["loss"] for one in runs.records(tmp_path / "run", "evaluations.jsonl")]
    assert losses == sorted(losses, reverse=True) and len(losses) == 5


def test_patience_needs_evaluations_during_the_run():
    with pytest.raises(ValueError, match=r"evaluation.patience \(3\) needs evaluation.every, got null"):
        config.EvaluationConfig(every=None, patience=3)
