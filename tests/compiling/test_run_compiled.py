"""Exported steps without TensorFlow: they compute what TensorFlow computes, and a killed run continues exactly."""

import json
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import result_files, run_compiled
from benchmarks.compiled_data import Stream
from benchmarks.compiled_program import DeviceMemoryError, memory_errors
from benchmarks.compiled_run import Schedule
from flash_tf import config
from flash_tf.compiling import artifact, manifest
from flash_tf.compiling.programs import Experiment
from flash_tf.data.stream import WindowStream
from flash_tf.training.optimizer import learning_rate
from flash_tf.training.restore import restore
from tests import numerics
from tests.compiling import exports
from tests.training import runs

STEPS = 8


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A causal artifact, and a run of it to the end."""
    folder = exports.folder_of(tmp_path_factory.mktemp("causal"), "causal_lm")
    return folder, exports.run(
        folder / "artifact", *exports.token_files(folder), "--out", folder / "run", "--shard-mib", 1
    )


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A masked artifact of packed documents, and a run of it to the end."""
    folder = exports.folder_of(tmp_path_factory.mktemp("masked"), "masked_lm", data={"packing": "documents"})
    return folder, exports.run(folder / "artifact", *exports.token_files(folder), "--out", folder / "run")


@pytest.fixture
def copied(causal, tmp_path):
    """A copy of the causal artifact, to be spoilt."""
    return shutil.copytree(causal[0] / "artifact", tmp_path / "artifact")


def in_tensorflow(folder):
    """The records of the same steps by TensorFlow, with its own reading of the windows."""
    made = manifest.read(str(folder / "artifact"))
    experiment = Experiment(*artifact.resolve(config.load(str(folder / "artifact/config.yaml"))))
    experiment.assign_initial_values()
    stream = WindowStream(
        exports.token_cache(folder, "train"),
        sequence_length=runs.LENGTH,
        overlap=experiment.objective.overlap,
        packing=made.config["data"]["packing"],
        align=experiment.model.align,
        seed=0,
        limit=10**6,
    )
    step = tf.function(experiment.train_step, autograph=False)
    found, rows = [], experiment.config.batch_size
    for done in range(STEPS):
        batch = {name: tf.constant(x) for name, x in stream.batch(done * rows, rows).items()}
        batch = {argument.name: batch[argument.name] for argument in experiment.batch(rows, runs.LENGTH)}
        at = tf.constant(done, tf.int64)
        found.append(step(batch, at, learning_rate(experiment.config.optimizer, STEPS, at)).numpy())
    return np.array(found)


@pytest.mark.full
@pytest.mark.parametrize("task", ["causal", "masked"])
def test_training_without_tensorflow_gives_its_records_step_by_step(task, request):
    folder, (status, _, err) = request.getfixturevalue(task)
    assert status == 0, err
    columns = manifest.read(str(folder / "artifact")).columns
    found = exports.records(folder / "run")
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    got = np.array([[record[column] for column in columns] for record in found])
    want = in_tensorflow(folder)
    assert numerics.relative_error(got, want) < numerics.FLOAT32_RUN
    np.testing.assert_allclose(got[:, columns.index("loss")], want[:, columns.index("loss")], rtol=numerics.FLOAT32_RUN)
    assert got[-1, columns.index("loss")] < got[0, columns.index("loss")]


@pytest.mark.full
@pytest.mark.parametrize("task", ["causal", "masked"])
def test_evaluate_reads_the_weights_back_and_gets_the_runners_validation_loss(task, request):
    folder, _ = request.getfixturevalue(task)
    (recorded,) = exports.records(folder / "run", "evaluations.jsonl")
    status, out, err = runs.command(folder, "evaluate", folder / "run", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (found["step"], found["tokens"]) == (recorded["step"], recorded["tokens"]) == (STEPS, recorded["tokens"])
    for figure in ("loss", "perplexity"):
        assert found[figure] == pytest.approx(recorded[figure], rel=numerics.FLOAT32_RUN)


@pytest.mark.full
def test_generate_continues_a_text_with_the_weights_of_such_a_run(causal):
    folder, _ = causal
    status, out, err = runs.command(folder, "generate", folder / "run", "--prompt", "one two", "--max-new-tokens", 5)
    assert status == 0, err
    model = restore(str(folder / "run")).model
    (ids,) = model.tokenizer.encode(["one two"])
    for _ in range(5):
        ids = np.append(ids, np.argmax(model(ids[None])[0, -1]))
    assert out == model.tokenizer.decode(ids) + "\n"


def test_a_run_shows_progress_and_says_where_its_weights_are(causal):
    folder, (_, out, err) = causal
    lines = err.splitlines()
    assert out == "" and lines[0].startswith("compiling ")
    assert any(line.startswith(f"step {STEPS}/{STEPS}  loss ") for line in lines)
    assert lines[-1].startswith(f"step {STEPS}: the weights are in {folder}/run/weights")


def wait_for_lines(path, count, process):
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


@pytest.mark.full
def test_a_killed_run_goes_on_from_its_saved_state_to_the_same_losses_and_weights(causal, tmp_path):
    folder, _ = causal
    long = ["--set", "train.steps=400", "--set", "optimizer.learning_rate=0.002", "--save-every", 50]
    arguments = [folder / "artifact", *exports.token_files(folder), *long]
    process = exports.start(*arguments, "--out", tmp_path / "killed")
    wait_for_lines(tmp_path / "killed/losses.jsonl", 120, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "killed/weights").exists()
    whole = exports.start(*arguments, "--out", tmp_path / "whole")
    status, _, err = exports.run(*arguments, "--out", tmp_path / "killed")
    assert whole.wait() == status == 0 and "going on from step 1" in err
    assert exports.records(tmp_path / "killed") == exports.records(tmp_path / "whole")
    assert exports.records(tmp_path / "killed", "evaluations.jsonl") == exports.records(
        tmp_path / "whole", "evaluations.jsonl"
    )
    one, other = (json.loads((tmp_path / name / "weights/manifest.json").read_text()) for name in ("killed", "whole"))
    assert one["step"] == 400 and one == other  # the sums of their shards too
    kept = config.load(str(tmp_path / "whole/config.yaml"))
    assert (kept.train.steps, kept.optimizer.learning_rate, kept.optimizer.warmup_steps) == (400, 0.002, 2)


@pytest.mark.full
def test_a_step_is_proved_and_timed_in_bfloat16(tmp_path):
    folder = exports.folder_of(tmp_path, "masked_lm", "train.precision=mixed_bfloat16")
    status, out, err = exports.run(folder / "artifact", "--steps", 10, "--results", tmp_path / "result.jsonl")
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
    assert "has format 99, but this program reads format 1" in refused(copied)
    spoil(copied, lambda values: values.__setitem__("format", 1) or values.pop("check"))
    assert "manifest.json is damaged" in refused(copied)
    (copied / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in refused(copied)


def test_a_program_that_is_missing_damaged_or_another_ones_is_refused(copied):
    shutil.copyfile(copied / "forward.hlo.pb", copied / "check.hlo.pb")
    assert "check.hlo.pb is not the program of its manifest" in refused(copied)
    (copied / "check.hlo.pb").write_bytes(b"nothing")
    assert "check.hlo.pb is damaged: it holds no HLO module" in refused(copied)
    (copied / "check.hlo.pb").unlink()
    assert "check.hlo.pb is missing" in refused(copied)


def test_initial_values_that_another_numpy_draws_otherwise_are_refused(copied):
    spoil(copied, lambda values: values.__setitem__("numbers", "0" * 16))
    assert f"NumPy {np.__version__} draws other initial values" in refused(copied)


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (np.zeros(100, np.int64), "must be a flat array of uint16 or int32, got int64"),
        (np.zeros((10, 10), np.int32), r"must be a flat array of uint16 or int32, got int32 [10, 10]"),
        (np.full(100, runs.VOCABULARY, np.uint16), "holds token 100, the model's vocabulary has 100"),
        (np.full(100, -1, np.int32), "holds token -1"),
        (np.ones(runs.LENGTH - 1, np.int32), "a window needs 32 tokens, the file has 31"),
    ],
)
def test_a_token_file_of_another_type_shape_vocabulary_or_length_is_refused(causal, tmp_path, tokens, line):
    np.save(tmp_path / "tokens.npy", tokens)
    assert line in refused(causal[0] / "artifact", "--tokens", tmp_path / "tokens.npy", "--out", tmp_path / "run")


def test_arguments_that_mean_nothing_are_refused(causal, tmp_path):
    made, tokens = causal[0] / "artifact", causal[0] / "train.npy"
    (tmp_path / "text.npy").write_text("text")
    out = ["--out", tmp_path / "run"]
    assert "text.npy is no .npy file" in refused(made, "--tokens", tmp_path / "text.npy", *out)
    np.savez(tmp_path / "several.npz", one=np.ones(9, np.uint16))
    assert "several.npz is no .npy file: it holds several" in refused(made, "--tokens", tmp_path / "several.npz", *out)
    assert "--tokens needs --out" in refused(made, "--tokens", tokens)
    assert "--results belongs to timing: training keeps" in refused(made, "--tokens", tokens, *out, "--results", "f")
    assert "--evaluate-every needs --validation" in refused(made, "--tokens", tokens, *out, "--evaluate-every", 2)
    assert "--save-every belongs to --tokens" in refused(made, "--save-every", 3)
    assert "--steps must be 10 or more" in refused(made, "--steps", 3)
    assert "--steps must be at most train.steps (8)" in refused(made, "--tokens", tokens, *out, "--steps", 9)
    assert "--shard-mib must be positive" in refused(made, "--tokens", tokens, *out, "--shard-mib", 0)
    assert "--xla-option takes NAME=VALUE" in refused(made, "--xla-option", "fast")
    for text, line in {
        "train.seed=1": "the step has all else in it",
        "optimizer.learning_rate=fast": "must be float, got 'fast'",
        "optimizer.learning_rate=nan": "must be a positive number, got 'nan'",
        "optimizer.learning_rate=0": "must be a positive number, got '0'",
        "optimizer.warmup_steps=-1": "must be a number that is not negative, got '-1'",
        "optimizer.schedule=flat": "must be one of linear, cosine, inverse_sqrt",
    }.items():
        assert line in refused(made, "--tokens", tokens, *out, "--set", text)


def test_a_folder_with_another_run_or_something_else_is_refused(causal, tmp_path):
    made, tokens = causal[0] / "artifact", ["--tokens", causal[0] / "train.npy"]
    assert "holds a run of another set" in refused(made, *tokens, "--out", causal[0] / "run", "--set", "train.steps=9")
    (tmp_path / "mine.txt").write_text("mine")
    assert "holds something else" in refused(made, *tokens, "--out", tmp_path)


def test_an_option_that_xla_does_not_know_is_named(causal):
    assert "No such compile option: 'xla_nothing'" in refused(causal[0] / "artifact", "--xla-option", "xla_nothing=1")


def test_a_device_without_memory_enough_is_said_in_one_line():
    with pytest.raises(DeviceMemoryError, match=r"^a step needs 93,132.26 GiB more memory than cpu has$"):
        with memory_errors(jax.devices()[0], "a step"):
            jax.numpy.zeros(10**14, "int8").block_until_ready()


@pytest.mark.full
def test_a_run_that_diverges_ends_and_keeps_what_it_saved_before(causal, tmp_path):
    folder, _ = causal
    arguments = ["--set", "optimizer.learning_rate=1e30", "--save-every", 1, "--out", tmp_path]
    status, _, err = exports.run(folder / "artifact", "--tokens", folder / "train.npy", *arguments)
    assert status == 1
    assert re.search(r"the loss or its gradient is not a number at step [2-8]; the saved state stays$", err.strip())
    with np.load(tmp_path / "state.npz") as state:
        assert state["step"] == len(exports.records(tmp_path))
        assert all(np.isfinite(state[name]).all() for name in state.files if "/" in name)


def test_windows_and_their_order_are_those_of_train_over_several_epochs(causal):
    folder, _ = causal
    made = manifest.read(str(folder / "artifact"))
    cache = exports.token_cache(folder, "train")
    stream = Stream(cache.get(0).tokens, made, pad_last=False)
    ours = WindowStream(
        cache, sequence_length=runs.LENGTH, overlap=1, packing="concatenate", align=8, seed=0, limit=10**6
    )
    program = made.programs["step"]
    for position in (0, len(stream) - 2, 3 * len(stream) + 1):
        np.testing.assert_array_equal(stream.batch(position, program)["tokens"], ours.batch(position, 4)["tokens"])


def test_the_schedules_of_numpy_and_tensorflow_are_one(causal):
    made = manifest.read(str(causal[0] / "artifact"))
    for schedule in ("linear", "cosine", "inverse_sqrt"):
        options = {"schedule": schedule, "learning_rate": 0.5, "warmup_steps": 10, "final_learning_rate": 0.1}
        rates = Schedule(made, [f"optimizer.{key}={value}" for key, value in options.items()] + ["train.steps=50"])
        want = [float(learning_rate(config.OptimizerConfig(**options), 50, tf.constant(i))) for i in range(60)]
        assert [rates.rate(i) for i in range(60)] == pytest.approx(want, rel=numerics.FLOAT32)
