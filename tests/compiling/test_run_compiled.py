"""Exported steps through JAX: they compute what TensorFlow computes, or are not timed."""

import json
import shutil

import jax
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import result_files, run_compiled
from benchmarks.compiled_program import (
    Compiled,
    DeviceMemoryError,
    batch_shapes,
    initial_variables,
    memory_errors,
    numbers_of_step,
)
from flash_tf import config
from flash_tf.compiling import artifact, manifest, values
from flash_tf.compiling.programs import Experiment
from tests import numerics
from tests.compiling import exports
from tests.training import runs

STEPS = 8


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """The folder of a causal artifact."""
    return exports.artifact_of(tmp_path_factory.mktemp("causal"), "causal_lm")


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """The folder of a masked artifact of packed documents."""
    return exports.artifact_of(tmp_path_factory.mktemp("masked"), "masked_lm", data={"packing": "documents"})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a causal artifact that is soon exported."""
    return exports.artifact_of(tmp_path_factory.mktemp("small"), "causal_lm", model=runs.SMALLEST)


@pytest.fixture
def copied(small, tmp_path):
    """A copy of the small artifact, to be spoilt."""
    return shutil.copytree(small, tmp_path / "artifact")


@pytest.mark.full
@pytest.mark.parametrize("task", ["causal", "masked"])
def test_a_step_through_jax_gives_tensorflows_records_step_by_step(task, request):
    folder = request.getfixturevalue(task)
    made, device = manifest.read(str(folder)), jax.devices("cpu")[0]
    experiment = Experiment(*artifact.resolve(config.load(str(folder / "config.yaml"))))
    experiment.assign_initial_values()
    in_tensorflow = tf.function(experiment.train_step, autograph=False)
    shapes, found, wanted = batch_shapes(made.programs["step"].arguments), [], []
    with jax.enable_x64(True):
        through_jax = Compiled(str(folder), made.programs["step"], device)
        variables = initial_variables(made, through_jax.program, device)
        for done in range(STEPS):
            batch, rate = values.made_up(shapes, runs.VOCABULARY, seed=done % 2), 1e-3 * (done + 1)
            if "segment_ids" in batch:
                batch["segment_ids"][:, runs.LENGTH // 2 :] = 2
            inputs = {**jax.device_put(batch, device), **numbers_of_step(done, rate, device)}
            found.append(np.asarray(through_jax(variables, inputs)))
            batch = {name: tf.constant(x) for name, x in batch.items()}
            wanted.append(in_tensorflow(batch, tf.constant(done, tf.int64), tf.constant(rate, tf.float32)).numpy())
    assert numerics.relative_error(np.array(found), np.array(wanted)) < numerics.FLOAT32_RUN
    losses = np.array([found, wanted])[..., made.columns.index("loss")]
    np.testing.assert_allclose(*losses, rtol=numerics.FLOAT32_RUN)
    assert losses[0, -1] < losses[0, 1]  # of the same batch


@pytest.mark.full
def test_a_step_is_proved_and_timed_in_bfloat16(tmp_path):
    made = exports.artifact_of(tmp_path, "masked_lm", "train.precision=mixed_bfloat16")
    status, out, err = exports.run(made, "--steps", 10, "--results", tmp_path / "result.jsonl")
    assert status == 0, err
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert lines["check"].strip().startswith("passed: losses ") and "median of 10" in lines["step time"]
    (row,) = result_files.read(tmp_path / "result.jsonl")
    assert (row["task"], row["n"], row["batch"], row["tokens"]) == ("mlm", runs.LENGTH, 4, 4 * runs.LENGTH)
    assert row["median_ms"] > 0 and row["model_flops"] > 0 and row["peak_bytes"] > 12 * row["parameters"]
    assert row["tokens_per_second"] == pytest.approx(4 * runs.LENGTH / row["median_ms"] * 1e3)
    assert row["device"] == "cpu" and "jax" in row["versions"]


@pytest.mark.full
def test_a_step_whose_losses_are_not_tensorflows_is_not_timed(copied):
    spoil(copied, lambda values: values["check"]["losses"].__setitem__(2, values["check"]["losses"][2] * 1.01))
    status, out, err = exports.run(copied, "--steps", 10, "--results", copied / "result.jsonl")
    assert (status, out) == (1, "")
    assert "fails its check: loss" in err.splitlines()[-1] and "at step 3" in err and "not timed" in err


def spoil(folder, change):
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def refused(*arguments):
    """The line that the runner ends with."""
    with pytest.raises((ValueError, OSError)) as error:
        run_compiled.main(list(map(str, arguments)))
    return " ".join(str(error.value).split())


def test_an_artifact_that_is_none_damaged_or_of_another_format_is_refused(copied, tmp_path):
    assert "is no artifact: it has no manifest.json" in refused(tmp_path)
    spoil(copied, lambda values: values.__setitem__("format", 99))
    assert f"has format 99, but this program reads format {manifest.FORMAT}" in refused(copied)
    spoil(copied, lambda values: values.__setitem__("format", manifest.FORMAT) or values.pop("check"))
    assert "manifest.json is damaged" in refused(copied)
    (copied / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in refused(copied)


def test_a_program_that_is_missing_damaged_or_another_ones_is_refused(copied):
    shutil.copyfile(copied / "decode.hlo.pb", copied / "check.hlo.pb")
    assert "check.hlo.pb is not the program of its manifest" in refused(copied)
    (copied / "check.hlo.pb").write_bytes(b"nothing")
    assert "check.hlo.pb is damaged: it holds no HLO module" in refused(copied)
    (copied / "check.hlo.pb").unlink()
    assert "check.hlo.pb is missing" in refused(copied)


def test_initial_values_that_another_numpy_draws_otherwise_are_refused(copied):
    spoil(copied, lambda values: values.__setitem__("numbers", "0" * 16))
    assert f"NumPy {np.__version__} draws other initial values" in refused(copied)


def test_arguments_that_mean_nothing_are_refused(small):
    assert "--steps must be 10 or more" in refused(small, "--steps", 3)
    assert "--xla-option takes NAME=VALUE" in refused(small, "--xla-option", "fast")


def test_an_option_that_xla_does_not_know_is_named(small):
    assert "No such compile option: 'xla_nothing'" in refused(small, "--xla-option", "xla_nothing=1")


def test_a_device_without_memory_enough_is_said_in_one_line():
    with pytest.raises(DeviceMemoryError, match=r"^a step needs 93,132.26 GiB more memory than cpu has$"):
        with memory_errors(jax.devices()[0], "a step"):
            jax.numpy.zeros(10**14, "int8").block_until_ready()
