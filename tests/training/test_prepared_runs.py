"""Runs on prepared text."""

import json

import numpy as np
import pytest

from flash_tf import config
from flash_tf.training import checkpoints, loop
from flash_tf.training.tensorflow_run import check_hosts
from tests.preparing.here import of_worker, prepared
from tests.training import runs
from tests.training.test_strategies import assert_same_curve, free_ports


@pytest.mark.full
@pytest.mark.parametrize("packing", ["documents", "concatenate"])
def test_a_run_that_stops_ends_in_the_bits_of_one_that_does_not(tmp_path, packing):
    path = prepared(tmp_path, model={"type": "causal_lm", **runs.SMALLEST, "dropout": 0.1}, data={"packing": packing})
    runs.train(path, tmp_path / "whole")
    runs.train(path, tmp_path / "halves", stop_after=4)
    assert len(runs.losses(tmp_path / "halves")) == 4
    assert "going on from step 4" in runs.train(path, tmp_path / "halves")
    runs.same(tmp_path / "whole", tmp_path / "halves")
    assert not (tmp_path / "whole" / "tokens").exists()
    evaluated = runs.records(tmp_path / "whole", "evaluations.jsonl")[-1]
    assert evaluated["tokens"] > 400 and np.isfinite(evaluated["loss"])


def test_prepared_text_that_does_not_fit_a_run_is_refused_before_any_work(tmp_path):
    path = prepared(tmp_path)
    for override, message in {
        "data.sequence_length=16": "was prepared with sequence_length 32, and this config needs 16",
        "data.packing=documents": "was prepared with kind concatenate, and this config needs documents",
        "model.type=causal_lm": "was prepared with overlap 0, and this config needs 1",
        f"data.source.path={tmp_path}": "has no prepared.json, which `flash-tf prepare` writes",
        "model.vocabulary_size=300": "has 100 pieces",
    }.items():
        with pytest.raises(ValueError, match=message):
            loop.train(config.load(path, [override]), f"{tmp_path}/run", runs.Lines())
    gone = tmp_path / "prepared" / "train" / "0000001-00000.windows"
    gone.unlink()
    with pytest.raises(ValueError, match=rf"{gone} is missing, and prepared.json names it"):
        loop.train(config.load(path), f"{tmp_path}/run", runs.Lines())
    assert not (tmp_path / "run" / "config.yaml").exists()


def of_workers(path, model_dir, count, *overrides, stop_after=None):
    """Trains in so many processes; what they show."""
    ports = free_ports(count)
    addresses = [f"localhost:{port}" for port in ports]
    started = [
        runs.start(of_worker, path, model_dir, addresses, i, *overrides, stop_after=stop_after if i == 1 else None)
        for i in range(count)
    ]
    return [runs.finish(one) for one in started]


@pytest.mark.full
def test_workers_read_the_batches_of_one_process_and_go_on_in_another_number(tmp_path):
    path = prepared(tmp_path, model={"depth": 1}, train={"tokens_per_step": 12 * runs.LENGTH})
    runs.in_child(runs.train, path, tmp_path / "one")
    of_workers(path, tmp_path / "three", 3)
    assert_same_curve(tmp_path / "three", tmp_path / "one")
    of_workers(path, tmp_path / "changed", 3, stop_after=3)  # a signal to worker 1 stops all at one step
    steps = len(runs.losses(tmp_path / "changed"))
    assert 3 <= steps < 8 and runs.checkpoints(tmp_path / "changed")[-1].name == f"step-{steps:08d}"
    shown = of_workers(path, tmp_path / "changed", 2)
    assert all(f"going on from step {steps}" in one for one in shown)
    assert_same_curve(tmp_path / "changed", tmp_path / "one")


class OfManyHosts:
    """As much of a TPU's strategy as is asked before any work."""

    extended = type("Extended", (), {"num_hosts": 8})


def test_several_hosts_of_a_tpu_take_prepared_text_alone(tmp_path):
    runs.corpus(tmp_path)
    text = config.load(runs.write(tmp_path))
    with pytest.raises(ValueError, match="'local' has 8 hosts, which read prepared text alone: `flash-tf prepare`"):
        check_hosts(text, OfManyHosts)
    check_hosts(config.load(runs.write(tmp_path, data={"source": {"type": "prepared", "path": "x"}})), OfManyHosts)


@pytest.mark.full
def test_a_line_says_where_the_number_of_replicas_is_part_of_the_function(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model={"depth": 1}, optimizer={"clip": {"scope": "replica", "norm": 0.1}})
    mirrored, line = "strategy.type=mirrored", "optimizer.clip.scope replica clips the gradient of each of"
    shown = runs.in_child(runs.train, path, tmp_path / "run", mirrored, devices=2, stop_after=4)
    assert f"{line} 2 replicas: another number is another run" in shown
    assert "optimizer.clip.scope" not in runs.in_child(runs.train, path, tmp_path / "one", stop_after=2)
    assert json.loads((runs.checkpoints(tmp_path / "run")[-1] / checkpoints.MARKER).read_text())["replicas"] == 2
    shown = runs.in_child(runs.train, path, tmp_path / "run")
    assert f"{line} 1 replicas: the run had 2, and goes on as another one" in shown
    again = runs.in_child(runs.train, path, tmp_path / "global", mirrored, "optimizer.clip.scope=global", devices=2)
    assert "optimizer.clip.scope" not in again
