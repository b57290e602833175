"""The trainer on JAX: the same losses, checkpoints and records as TensorFlow's. Each test's children run JAX."""

import json
import shutil
import time
import types
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from flash_tf import config
from flash_tf.training import checkpoint_files, loop, preflight
from flash_tf.training.on_jax import loop as on_jax
from tests import numerics
from tests.training import jax_child, runs
from tests.training.test_prepared_runs import prepared
from tests.training.test_strategies import free_ports

# Rows for eight devices. All checkpoints stay.
SIZES = {"tokens_per_step": 16 * runs.LENGTH, "keep": 9, "jit_compile": "auto"}
CLIP = {"clip": {"scope": "global", "norm": 0.5}}
SYSTEMS = [
    pytest.param({"type": "flash", "chunk_size": 4}, id="flash"),
    pytest.param({"type": "linear_attention", "heads": 2}, id="linear_attention"),
    pytest.param({"type": "gla", "heads": 2}, id="gla"),
    pytest.param({"type": "mamba"}, id="mamba"),
    pytest.param({"type": "self_attention", "heads": 2}, id="self_attention"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("on_jax")
    runs.corpus(path)
    return path


def cut(model_dir, step):
    """Deletes the checkpoints after a step."""
    for one in runs.checkpoints(model_dir):
        if int(one.name.removeprefix("step-")) > step:
            shutil.rmtree(one)


def arrays(model_dir):
    """The newest checkpoint's arrays, as NumPy."""
    found = checkpoint_files.Arrays(str(runs.checkpoints(model_dir)[-1]))
    return found.read(dict.fromkeys(found.shapes))


def curves(folder):
    """The points that TensorBoard finds: of each folder and name, the value at each step."""
    found = {}
    for path in folder.rglob("events.*"):
        tags = found.setdefault(str(path.parent.relative_to(folder)), {})
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for one in event.summary.value:
                tags.setdefault(one.tag, {})[event.step] = one.simple_value
    return found


def assert_same_curve(found, wanted):
    for (step, *figures), (same, *others) in zip(runs.losses(found), runs.losses(wanted), strict=True):
        assert step == same
        assert figures == pytest.approx(others, rel=numerics.FLOAT32_RUN)


@pytest.mark.full
def test_a_run_of_tensorflow_goes_on_on_a_mesh_of_jax_with_the_same_losses_and_is_evaluated_by_either(folder):
    small = {**SIZES, "steps": 4, "jit_compile": False}
    path = runs.write(folder, model={"depth": 1}, train=small, optimizer=CLIP, evaluation={"every": None})
    tensorflow, jax = folder / "tensorflow", folder / "jax"
    runs.train(path, tensorflow)
    shutil.copytree(tensorflow, jax)
    cut(jax, 2)
    mesh = ["strategy={type: jax, mesh: {data: 2, fsdp: 2}}", "train.jit_compile=auto"]
    assert jax_child.train([path, str(jax), mesh, None], devices=4) == [""]
    assert_same_curve(jax, tensorflow)
    notes = json.loads((runs.checkpoints(jax)[-1] / "complete.json").read_text())
    assert (notes["step"], notes["position"]) == (4, 4 * 16)
    assert loop.evaluate(str(jax), runs.Lines(), 4)["loss"] == pytest.approx(notes["loss"], rel=numerics.FLOAT32)


@pytest.mark.full
def test_a_run_of_jax_goes_on_in_tensorflow_with_the_same_losses(folder, tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, train=SIZES, optimizer=CLIP)
    jax, tensorflow = tmp_path / "jax", tmp_path / "tensorflow"
    assert jax_child.train([path, str(jax), ["strategy.type=jax"], None]) == [""]
    shutil.copytree(jax, tensorflow)
    cut(tensorflow, 4)
    runs.train(path, tensorflow, "train.jit_compile=false")
    assert_same_curve(tensorflow, jax)


@pytest.mark.full
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"masking": {"whole_words": True}, "train": {"accumulate": 2}}, id="accumulate"),
        pytest.param(
            {"model": {"type": "causal_lm", "norm": "layer_norm"}, "data": {"packing": "documents"}}, id="documents"
        ),
        pytest.param({"optimizer": {"clip": {"scope": "replica", "norm": 0.1}}}, id="replica"),
    ],
)
def test_two_replicas_of_a_mesh_give_the_losses_of_two_mirrored_ones(sections, folder, tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, **{**sections, "train": {**SIZES, **sections.get("train", {}), "jit_compile": False}})
    mirrored = "strategy={type: mirrored, devices: ['CPU:0', 'CPU:1']}"
    runs.in_child(runs.train, path, tmp_path / "tensorflow", mirrored, devices=2)
    shutil.copytree(tmp_path / "tensorflow", tmp_path / "jax")
    cut(tmp_path / "jax", 2)
    job = [path, str(tmp_path / "jax"), ["strategy.type=jax", "train.jit_compile=auto"], None]
    assert jax_child.train(job, devices=2) == [""]
    assert_same_curve(tmp_path / "jax", tmp_path / "tensorflow")


@pytest.mark.full
def test_a_run_that_was_stopped_and_resumed_is_the_same_to_the_bit(folder, tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, train=SIZES, model={"dropout": 0.1}, strategy={"type": "jax"})
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    jobs = [[path, whole, [], None], [path, parts, [], 3], [path, parts, [], None]]
    done, stopped, resumed = jax_child.train(*jobs)
    assert (done, stopped, resumed) == ("", "Interrupted: SIGTERM", "")
    assert runs.losses(whole) == runs.losses(parts)
    assert runs.bits(arrays(whole)) == runs.bits(arrays(parts))
    points = curves(Path(whole, "summaries"))
    assert points["validation"]["perplexity"].keys() == {4, 8}
    losses = [record["loss"] for record in runs.records(whole)]
    assert min(losses) <= points["."]["loss"][8] <= max(losses) and points["."]["steps_per_second"][8] > 0


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, True])
def test_the_shape_of_the_mesh_changes_no_loss_and_each_device_holds_its_part_of_the_weights(remat, folder, tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, train=SIZES, model={"dropout": 0.0, "remat": remat}, strategy={"type": "jax"})
    meshes = ({"data": 8}, {"fsdp": 8}, {"data": 4, "fsdp": 2}, {"sequence": 8}, {"fsdp": 2, "model": 2, "sequence": 2})
    jobs = [[path, str(tmp_path / str(i)), [f"strategy.mesh={json.dumps(one)}"], None] for i, one in enumerate(meshes)]
    assert jax_child.train(*jobs, devices=8) == [""] * len(meshes)
    assert jax_child.train([path, str(tmp_path / "one"), [], None]) == [""]
    for i in range(len(meshes)):
        assert_same_curve(tmp_path / str(i), tmp_path / "one")
    for i, axis in ((1, "fsdp"), (4, "fsdp"), (4, "model")):
        stored = json.loads((runs.checkpoints(tmp_path / str(i))[-1] / "arrays" / "_sharding").read_text())
        assert sum(axis in str(one) for one in stored.values()) > len(stored) / 2


@pytest.mark.full
@pytest.mark.parametrize("mixer", SYSTEMS)
def test_devices_that_divide_the_tokens_change_no_loss_of_a_causal_model(mixer, folder, tmp_path):
    runs.corpus(tmp_path)
    model = {"type": "causal_lm", "norm": "layer_norm", "mixer": mixer, "depth": 1}
    path = runs.write(
        tmp_path, train=SIZES, model=model, data={"packing": "documents"}, strategy={"type": "jax"}, optimizer=CLIP
    )
    mesh = ["strategy.mesh={data: 2, sequence: 4}"]
    assert jax_child.train([path, str(tmp_path / "eight"), mesh, None], devices=8) == [""]
    assert jax_child.train([path, str(tmp_path / "one"), [], None]) == [""]
    assert_same_curve(tmp_path / "eight", tmp_path / "one")


@pytest.mark.full
def test_what_devices_exchange_for_a_sequence_does_not_grow_with_it(tmp_path):
    model = {"type": "causal_lm", "norm": "layer_norm", "mixer": {"type": "flash", "chunk_size": 4}}
    path = runs.write(tmp_path, model=model, train={"jit_compile": "auto"}, strategy={"type": "jax"})
    lengths = (64, 1024)
    sizes = [[f"data.sequence_length={n}", f"train.tokens_per_step={n}"] for n in lengths]
    short, long = jax_child.exchanged(path, sizes, {"sequence": 4})
    assert short == long > 0


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (4, 2)])
def test_processes_equal_one_and_go_on_in_fewer_after_one_was_killed(before, after, folder, tmp_path):
    runs.corpus(tmp_path)
    train = {**SIZES, "steps": 500, "checkpoint_every": 50, "keep": 99}
    # At a higher rate the roundings, which differ with the processes, grow too much in so many steps.
    path = runs.write(tmp_path, train=train, evaluation={"every": None}, optimizer={"learning_rate": 3e-4})
    overrides, several = ["strategy.type=jax", "train.steps_per_loop=10"], tmp_path / "several"
    assert jax_child.train([path, str(tmp_path / "one"), overrides, None], devices=4) == [""]

    def start(number):
        workers = [f"127.0.0.1:{port}" for port in free_ports(number)]
        processes = (
            [[f"strategy.workers={workers}", f"strategy.index={i}"] for i in range(number)] if number > 1 else [[]]
        )
        devices = 4 // number
        return [jax_child.start([path, str(several), [*overrides, *one], None], devices=devices) for one in processes]

    first, *others = start(before)
    deadline = time.monotonic() + 400
    while len(list(several.glob("checkpoints/*/complete.json"))) < 2:
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()
        time.sleep(0.05)
    others[-1].kill()
    out, err = first.communicate(timeout=120)
    for process in others:
        process.communicate(timeout=120)
    assert f"worker {before - 1} no longer answers" in out + err
    for process in start(after):
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0 and "ended: \n" in out, (out, err)
    assert_same_curve(several, tmp_path / "one")


@pytest.mark.full
def test_prepared_text_trains_without_tensorflow_as_with_it(tmp_path):
    sections = {"masking": {"whole_words": True}, "train": {**SIZES, "jit_compile": False}}
    path = prepared(tmp_path, **sections)
    tensorflow, jax = tmp_path / "tensorflow", tmp_path / "jax"
    runs.train(path, tensorflow)
    overrides = ["strategy.type=jax", "train.jit_compile=auto"]
    assert jax_child.train([path, str(tmp_path / "new"), overrides, None], without_tensorflow=True) == [""]
    shutil.copytree(tensorflow, jax)
    cut(jax, 4)
    assert jax_child.train([path, str(jax), overrides, None]) == [""]
    assert_same_curve(jax, tensorflow)
    new = runs.records(tmp_path / "new")
    assert len(new) == 8 and [one["predicted_tokens"] for one in new] == [
        one["predicted_tokens"] for one in runs.records(tensorflow)
    ]


@pytest.mark.full
def test_deterministic_operators_change_no_loss_on_a_cpu(folder, tmp_path):
    model, train = {"mixer": {"type": "self_attention", "heads": 2}}, {**SIZES, "steps": 3}
    path = runs.write(folder, model=model, train=train, strategy={"type": "jax"})
    asked = [[path, str(tmp_path / name), [f"train.deterministic={name}"], None] for name in ("true", "false")]
    assert jax_child.train(*asked) == ["", ""]
    assert runs.losses(tmp_path / "true") == runs.losses(tmp_path / "false")


def test_a_deterministic_run_does_without_cudnns_attention(folder, tmp_path, monkeypatch):
    path, called = runs.write(folder, train=SIZES, strategy={"type": "jax"}), []
    monkeypatch.setattr(keras.config, "disable_flash_attention", lambda: called.append(True))
    monkeypatch.setattr(on_jax.processes, "together", None)
    for asked in (False, True):
        overrides = [f"train.deterministic={json.dumps(asked)}"]
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            on_jax.train(config.load(path, overrides), str(tmp_path / "run"), types.SimpleNamespace(line=print))
        assert called == [True] * asked


@pytest.mark.full
def test_a_mesh_that_does_not_use_each_device_once_is_refused_before_anything_is_written(folder, tmp_path):
    path = runs.write(folder, train=SIZES, strategy={"type": "jax", "mesh": {"data": 3}})
    (said,) = jax_child.train([path, str(tmp_path / "run"), [], None], devices=2)
    assert said == "ValueError: strategy.mesh must use each of the 2 devices once, got data 3 x fsdp 1"
    assert not Path(tmp_path, "run", "config.yaml").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.jit_compile=false", "train.jit_compile must not be false"),
        ("profile={start: 1, steps: 1}", "profile needs a strategy of TensorFlow"),
    ],
)
def test_what_jax_cannot_do_is_refused(override, message, folder):
    path = runs.write(folder, train=SIZES, strategy={"type": "jax"})
    with pytest.raises(ValueError, match=message):
        preflight.check_values(config.load(path, [override]))
