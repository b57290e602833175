"""The same run on one device, on several, and in several processes."""

import contextlib
import socket

import numpy as np
import pytest
import tensorflow as tf

from flash_tf import config
from flash_tf.training import loop, preflight
from flash_tf.training.update import dropouts
from tests import numerics
from tests.training import runs

# Predicted tokens differ by replica.
CAUSAL = {"model": {"type": "causal_lm", **runs.SMALLEST}, "data": {"packing": "documents"}}
MIRRORED = "strategy.type=mirrored"


def write(folder, model=(), data=()):
    runs.corpus(folder)
    optimizer = {"clip": {"scope": "global", "norm": 0.5}}
    return runs.write(folder, model={"depth": 1, **dict(model)}, data=dict(data), optimizer=optimizer)


def assert_same_curve(model_dir, other):
    got, want = (np.array(runs.losses(one)) for one in (model_dir, other))
    assert len(want) == 8
    assert numerics.relative_error(got, want) < numerics.FLOAT32_RUN


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A masked run on one device."""
    folder = tmp_path_factory.mktemp("single")
    path = write(folder)
    runs.in_child(runs.train, path, folder / "one")
    return folder


@pytest.mark.full
def test_two_replicas_give_the_loss_curve_of_one_device_for_a_masked_model(single, tmp_path):
    shown = runs.in_child(runs.train, str(single / "config.yaml"), tmp_path / "two", MIRRORED, devices=2)
    assert "step 8/8" in shown
    assert_same_curve(tmp_path / "two", single / "one")


@pytest.mark.full
def test_two_replicas_give_the_loss_curve_of_one_device_for_a_causal_model_of_packed_documents(tmp_path):
    path = write(tmp_path, **CAUSAL)
    rare = ("train.checkpoint_every=8", "evaluation.every=null")
    one = runs.start(runs.train, path, tmp_path / "one", *rare)
    runs.in_child(runs.train, path, tmp_path / "two", MIRRORED, *rare, devices=2)
    runs.finish(one)
    assert_same_curve(tmp_path / "two", tmp_path / "one")


@pytest.mark.full
def test_a_checkpoint_of_one_device_goes_on_under_two_replicas_and_the_other_way_round(single, tmp_path):
    path, ways = str(single / "config.yaml"), {"up": ([], 1, [MIRRORED], 2), "down": ([MIRRORED], 2, [], 1)}
    first = [runs.start(runs.train, path, tmp_path / way, *before, devices=devices, stop_after=4)
             for way, (before, devices, *_) in ways.items()]  # fmt: skip
    assert all("saving after this loop" in runs.finish(started) for started in first)
    second = [runs.start(runs.train, path, tmp_path / way, *after, devices=devices)
              for way, (*_, after, devices) in ways.items()]  # fmt: skip
    assert all("going on from step 4" in runs.finish(started) for started in second)
    for way in ways:
        assert_same_curve(tmp_path / way, single / "one")


def dropped(path, model_dir):
    """Logits of the same tokens at two steps on two replicas, by (step, replica); and all of them again."""
    run, made = runs.opened(path, model_dir, MIRRORED)
    assert dropouts(run.model)
    tokens = tf.constant(np.arange(10)[None] + 10)
    for weight in run.model.trainable_variables:
        if "out_projection/kernel" in weight.path:
            weight.assign(1e6 * weight)  # at initialization the layer gives almost nothing

    def replica(step):
        context = tf.distribute.get_replica_context()
        made.step._seed_dropout(step, context)
        return run.model(tokens, training=True)

    found = {}
    for time, step in enumerate((0, 1, 0)):
        values = run.strategy.run(replica, args=(tf.constant(step, tf.int64),))
        for number, value in enumerate(run.strategy.experimental_local_results(values)):
            found[time, number] = value.numpy()
    return found


def test_dropout_differs_by_replica_and_by_step_and_follows_from_them(tmp_path):
    path = write(tmp_path, model={**runs.SMALLEST, "dropout": 0.5})
    logits = runs.in_child(dropped, path, str(tmp_path / "model"), devices=2)
    different = [logits[key] for key in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for i, one in enumerate(different):
        assert all(numerics.relative_error(one, other) > 0.1 for other in different[:i])
    for number in (0, 1):
        np.testing.assert_array_equal(logits[2, number], logits[0, number])


def test_replicas_that_the_batch_does_not_divide_by_are_refused(tmp_path):
    path = write(tmp_path)
    with pytest.raises(RuntimeError, match="4 sequences a step .* must be a multiple of 3 replicas"):
        runs.in_child(runs.train, path, tmp_path / "model", MIRRORED, devices=3)


def evaluated(path, model_dir, *overrides):
    return loop.train(config.load(path, overrides), str(model_dir), runs.Lines())


def free_ports(count=2):
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]


def free_to_choose(path, model_dir):
    """Sets TensorFlow's devices after the checks before training, which it refuses once it has begun."""
    preflight.check(config.load(path), model_dir)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return len(tf.config.list_logical_devices("CPU"))


def test_the_checks_before_training_leave_tensorflow_to_the_strategy(tmp_path):
    assert runs.in_child(free_to_choose, write(tmp_path), str(tmp_path / "model")) == 2


@pytest.mark.full
def test_two_workers_agree_with_each_other_and_with_one_device(single, tmp_path):
    workers = ", ".join(f"localhost:{port}" for port in free_ports())
    options = [f"strategy={{type: multi_worker, workers: [{workers}], index: {index}}}" for index in (0, 1)]
    path = str(single / "config.yaml")
    started = [runs.start(evaluated, path, tmp_path / "model", option) for option in options]
    chief, other = (runs.finish(one) for one in started)
    assert chief == other
    assert_same_curve(tmp_path / "model", single / "one")
    want = runs.records(single / "one", "evaluations.jsonl")[-1]
    assert chief["loss"] == pytest.approx(want["loss"], rel=numerics.FLOAT32_RUN)
    assert chief["tokens"] == want["tokens"]
    left = {folder.name for folder in (tmp_path / "model/checkpoints").iterdir()}
    assert left <= {f"step-0000000{step}" for step in (2, 4, 6, 8)}


def _both(path, folder, options, others):
    return [runs.train(path, f"{folder}/{i}", *one) for i, one in enumerate((options, others))]


@pytest.mark.full
def test_runs_of_other_widths_and_a_deterministic_one_follow_each_other_in_one_process(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model=runs.SMALLEST, train={"steps": 2}, evaluation={"every": None})
    mirrored = "strategy.type=mirrored"
    shown = runs.in_child(_both, path, str(tmp_path / "a"), [mirrored], [mirrored, "model.width=32"], devices=2)
    assert all("step 2" in one for one in shown)
    shown = runs.in_child(_both, path, str(tmp_path / "b"), ["train.deterministic=true"], [])
    assert all("step 2" in one for one in shown)
