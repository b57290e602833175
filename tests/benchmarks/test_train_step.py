"""The benchmark of training steps: in TensorFlow, and exported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import keras_step, result_files, train_step
from flash_tf import config
from flash_tf.compiling import artifact, programs
from flash_tf.training import modelling

ROOT = Path(__file__).parents[2]
TINY = [
    "model.width=16",
    "model.depth=1",
    "model.vocabulary_size=64",
    "model.mixer={type: flash, chunk_size: 8, key_dim: 8}",
]
WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
from benchmarks import device, train_step
device.program(train_step.main)
"""


rows = result_files.read


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An artifact, and one whose second loss TensorFlow never computed."""
    right, wrong = (str(tmp_path_factory.mktemp("artifacts") / name) for name in ("right", "wrong"))
    sizes = ["data.sequence_length=16", "train.tokens_per_step=32"]
    experiment = programs.Experiment(*artifact.resolve(config.load("lm_wiki40b/flash", [*TINY, *sizes])))
    artifact.export("lm_wiki40b/flash", experiment, right, None, lambda line: None)
    shutil.copytree(right, wrong)
    manifest = Path(wrong, "manifest.json")
    values = json.loads(manifest.read_text())
    values["check"]["losses"][1] *= 1.1
    manifest.write_text(json.dumps(values))
    return right, wrong


@pytest.mark.full
def test_a_step_is_timed_in_tensorflow(tmp_path, capsys):
    result = str(tmp_path / "result.jsonl")
    overrides = [text for option in TINY for text in ("--set", option)]
    sizes = ["--lengths", "16", "--tokens", "32", "--steps", "10"]
    assert train_step.main(["--models", "flash", "--task", "mlm", *sizes, *overrides, "--results", result]) == 0
    (row,) = rows(result)
    assert row["variant"] == ", ".join(TINY)
    expected = {"model": "flash", "framework": "TensorFlow", "task": "mlm", "n": 16, "batch": 2, "tokens": 32}
    assert expected.items() <= row.items()
    assert (row["steps"], row["predicted"]) == (10, 2)
    assert row["tokens_per_second"] == pytest.approx(32 / row["median_ms"] * 1e3)
    wanted = modelling.with_masking(
        config.load("mlm_c4/flash", [*TINY, "data.sequence_length=16", "train.tokens_per_step=32"])
    )
    assert row["model_flops"] == modelling.training_flops_per_step(wanted, modelling.make_model(wanted))
    assert "flash" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.full
def test_an_exported_step_is_timed_without_tensorflow_and_a_wrong_one_is_not_timed(exported, tmp_path):
    right, wrong = exported
    result = str(tmp_path / "result.jsonl")
    options = ["--exported", wrong, right, "--steps", "10", "--results", result]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW, *options], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")
    untimed, timed = rows(result)
    assert untimed["wrong"] and "fails its check" in untimed["error"] and "median_ms" not in untimed
    same = {"model": "flash", "task": "lm", "n": 16, "batch": 2, "tokens": 32, "framework": "TensorFlow"}
    assert same.items() <= timed.items() and same.items() <= untimed.items()
    assert timed["median_ms"] > 0 and timed["steps"] == 10


@pytest.mark.full
def test_steps_of_an_exported_one_are_traced(exported, tmp_path):
    options = ["--exported", exported[0], "--steps", "10", "--trace", str(tmp_path), "--results", f"{tmp_path}/x.jsonl"]
    command = [sys.executable, "-c", WITHOUT_TENSORFLOW, *options]
    # The profiler of a JAX that also finds libtpu, of another version, ends the process.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "right.xplane.pb").stat().st_size > 10_000


ON_JAX = """
import sys
sys.modules["tensorflow"] = None
from benchmarks import device, keras_step, train_step
keras_step.GRADIENT_ERROR = float(sys.argv.pop(1))
device.program(train_step.main)
"""


@pytest.mark.full
@pytest.mark.parametrize(("allowed", "status"), [(0.1, 0), (0.0, 1)])
def test_a_step_is_timed_in_keras_on_jax_without_tensorflow_if_its_gradients_are_right(allowed, status, tmp_path):
    result = str(tmp_path / "result.jsonl")
    sizes = ["--models", "transformer_plus_plus", "--task", "mlm", "--lengths", "16", "--tokens", "32", "--steps", "10"]
    sizes += [
        text for option in (*TINY[:3], "model.mixer={type: self_attention, heads: 2}") for text in ("--set", option)
    ]
    command = [sys.executable, "-c", ON_JAX, str(allowed), *sizes, "--results", result]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "KERAS_BACKEND": "jax"})
    assert (done.returncode, done.stderr) == (status, "")
    (row,) = rows(result)
    same = {"model": "transformer_plus_plus", "task": "mlm", "framework": "Keras on JAX", "predicted": 2}
    assert same.items() <= row.items()
    assert ("median_ms" in row, row.get("wrong", False)) == (status == 0, status == 1)


def test_a_gradient_that_is_no_number_is_the_worst_wherever_it_stands():
    assert keras_step.worst({"a": 0.01, "b": float("nan"), "c": 0.02}) == "b"
    assert keras_step.worst({"a": 0.01, "b": 0.02}) == "b"


def test_bad_input_is_named_before_anything_is_timed(tmp_path):
    for arguments, said in (
        (["--steps", "9"], "--steps must be 10 or more, for a median, got 9"),
        (["--lengths", "500"], "every length must divide"),
        (["--models", "flash", "flashy"], "did you mean 'lm_wiki40b/flash'"),
        (["--exported", str(tmp_path)], "is no artifact"),
        (["--exported", "a", "--lengths", "512"], "--lengths does not go with --exported"),
        (["--xla-option", "a=b"], "--xla-option needs --exported"),
        (["--trace", "traces"], "--trace needs --exported"),
        (["--exported", "a/lm", "b/lm", "--trace", "traces"], "folders, which must differ, got lm lm"),
    ):
        with pytest.raises(ValueError, match=said.replace("(", r"\(")):
            train_step.main([*arguments, "--results", str(tmp_path / "result.jsonl")])
    assert not (tmp_path / "result.jsonl").exists()
