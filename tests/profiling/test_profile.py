"""Profiles of real steps on a CPU agree with a clock, the model and the input."""

import contextlib
import json
import time
from pathlib import Path

import pytest
import tensorflow as tf

from flash_tf import config
from flash_tf.data.stream import WindowStream
from flash_tf.profiling import latency, trace
from flash_tf.profiling.capture import Capture
from flash_tf.training import modelling
from flash_tf.training import profile as profiles
from tests import numerics
from tests.training import runs
from tests.training.test_bad_input import one_line

SLOW = 0.3  # seconds of a batch that is slow on purpose; the tiny model's step takes about 10 ms
HEAVY = {"width": 192, "depth": 2}  # some 100 ms, with the tokens below


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    runs.corpus(folder)
    return folder


@pytest.fixture(scope="module")
def shallow(folder):
    """A masked model of one block, in steps without XLA."""
    return profile(folder, steps=3, model={"depth": 1})[0]


@pytest.fixture(scope="module")
def timed(folder):
    """The same wider, deeper and with more tokens a step; and each step's time on the clock, in milliseconds."""
    path = runs.write(folder, model=HEAVY, train={"tokens_per_step": 32 * runs.LENGTH, "steps": 20})
    run, trainer = runs.opened(path, folder / "heavy")
    for _ in range(2):
        trainer.train(tf.constant(1))
    capture, clock = Capture(str(folder / "heavy/profile"), "train"), []
    for number in range(1, 5):
        with capture.step(number):
            start = time.perf_counter()
            trainer.train(tf.constant(1))
            clock.append(1e3 * (time.perf_counter() - start))
    return profiles.finish(capture, profiles.training_work(run)), clock


@pytest.fixture(scope="module")
def heavy(timed):
    return timed[0]


def profile(folder, mode="train", *, steps=4, batch_size=1, overrides=(), **sections):
    """The result, and the folder that the trace is in."""
    sections["evaluation"] = {"every": None}
    loaded = config.load(runs.write(folder, **sections), overrides)
    out = folder / str(len(list(folder.iterdir())))
    lines = runs.Lines()
    options = {"model_dir": None, "folder": str(out), "steps": steps, "batch_size": batch_size, "progress": lines}
    return profiles.profile(loaded, mode, **options), out


@contextlib.contextmanager
def slow_batches(monkeypatch):
    """Each batch takes a while to make."""
    real = WindowStream.batch

    def batch(self, *args):
        time.sleep(SLOW)
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(WindowStream, "batch", batch)
        yield


@pytest.mark.full
def test_a_step_whose_input_is_made_slowly_is_input_bound(folder, monkeypatch):
    with slow_batches(monkeypatch):
        result, _ = profile(folder, model={"depth": 1})
    assert result["bound"] == "input"
    assert result["input_share"] > 0.5
    assert 0.5e3 * SLOW < result["median"]["input_ms"] < result["median"]["total_ms"]
    assert "input-bound" in latency.as_text(result)


@pytest.mark.full
def test_the_same_with_quick_input_and_a_heavier_model_is_compute_bound(heavy):
    assert heavy["bound"] == "compute"
    assert heavy["input_share"] < latency.WAITING
    assert "compute-bound" in latency.as_text(heavy)


@pytest.mark.full
def test_total_is_the_time_on_the_clock_and_its_parts_add_up_to_it(timed):
    result, clock = timed
    steps = result["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert sum(step["total_ms"] for step in steps) == pytest.approx(sum(clock), rel=numerics.TRACE_CLOCK)
    for step in steps:
        parts = step["device_ms"] + step["host_ms"] + step["input_ms"]
        assert parts == pytest.approx(step["total_ms"], rel=numerics.FLOAT64)
        assert min(step["device_ms"], step["host_ms"], step["input_ms"]) >= 0 < step["device_ms"]


@pytest.mark.full
def test_rates_follow_from_the_models_own_flops_and_a_step_without_the_profiler(folder):
    result, out = profile(folder, model={"type": "causal_lm", "depth": 1}, train={"jit_compile": True})
    loaded = modelling.with_masking(config.load(str(folder / "config.yaml")))
    model = modelling.make_model(loaded)
    seconds = result["untraced"]["total_ms"] / 1e3
    assert result["model_flops_per_step"] == 3 * 4 * model.flops(runs.LENGTH, runs.LENGTH)
    assert result["flops_per_second"] == pytest.approx(result["model_flops_per_step"] / seconds)
    assert result["mfu"] == pytest.approx(result["flops_per_second"] / result["peak_flops_per_second"])
    assert result["tokens_per_second"] == pytest.approx(4 * runs.LENGTH / seconds)
    assert 0 < result["mfu"] < 1
    # XLA compiles its programs, so their memory is known: at least all weights, and at most a few MiB.
    weights = sum(4 * v.shape.num_elements() for v in model.trainable_variables)
    assert result["peak_bytes_by"] == "XLA" and weights < result["peak_bytes"] < 64 * 2**20
    assert json.loads((out / "latency.json").read_text()) == result
    (found,) = out.glob("plugins/profile/*/*.xplane.pb")  # where TensorBoard looks
    assert trace.load([str(found)]).planes


@pytest.mark.full
def test_the_memory_of_a_step_without_xla_is_what_xla_would_take(shallow):
    assert shallow["peak_bytes_by"] == "XLA, of a program not run"
    assert 4 * 16 * runs.VOCABULARY < shallow["peak_bytes"] < 64 * 2**20
    assert "if it compiled them" in latency.as_text(shallow)


@pytest.mark.full
def test_reading_and_writing_text_are_profiled_too(folder):
    causal = {"type": "causal_lm", "depth": 1}
    prompt, _ = profile(folder, "prefill", batch_size=3, model=causal)
    assert (prompt["tokens_per_step"], prompt["median"]["input_ms"]) == (3 * runs.LENGTH, 0)
    written, _ = profile(folder, "decode", steps=2, batch_size=2, model=causal)
    assert written["tokens_per_step"] == 2 * runs.LENGTH
    assert written["ms_per_token"] == pytest.approx(written["untraced"]["total_ms"] / runs.LENGTH)
    assert "ms a token" in latency.as_text(written)
    # Writing a token sends one vector through the matrices, so its operations run once for each token.
    assert max(row["count"] for row in written["operations"]) >= runs.LENGTH
    # Reading as many tokens costs the same, except for pairs of tokens; and reading runs the head once only.
    head = 2 * 16 * runs.VOCABULARY
    a_text = prompt["model_flops_per_step"] / 3 - head
    assert written["model_flops_per_step"] / 2 == pytest.approx(a_text + runs.LENGTH * head)


@pytest.mark.full
def test_the_costliest_operations_are_ten_in_order_of_layers_taken_together(shallow, heavy):
    for result in (shallow, heavy):
        shares = [row["share"] for row in result["operations"]]
        assert len(shares) == latency.COSTLIEST
        assert shares == sorted(shares, reverse=True) and 0 < sum(shares) < 1
    few, more = products(shallow), products(heavy)
    assert few.keys() & more.keys()
    assert all(more[name] == HEAVY["depth"] * few[name] for name in few.keys() & more.keys())


def products(result):
    """How often each of the mixers' costliest products runs in a step; tables of positions may be shared by blocks."""
    kinds = {"Einsum", "MatMul", "BatchMatMulV2"}
    rows = [row for row in result["operations"] if "mixer" in row["operation"] and row["kind"] in kinds]
    return {(row["operation"], row["kind"]): row["count"] for row in rows}


def replicated(folder):
    """A profile under two replicas, for a child with two devices."""
    return profile(folder, steps=3, model={"depth": 1}, overrides=["strategy.type=mirrored"])[0]


@pytest.mark.full
def test_figures_of_two_replicas_are_of_a_step_and_an_operation_is_counted_once(folder, shallow):
    result = runs.in_child(replicated, folder, devices=2)
    assert (shallow["replicas"], result["replicas"]) == (1, 2)
    assert result["model_flops_per_step"] == shallow["model_flops_per_step"]
    for step in result["steps"]:
        assert step["device_ms"] + step["host_ms"] + step["input_ms"] == pytest.approx(step["total_ms"])
    one, two = products(shallow), products(result)
    assert one.keys() & two.keys()
    assert all(one[name] == two[name] for name in one.keys() & two.keys())


def test_a_folder_with_brackets_has_its_trace_found(tmp_path):
    capture = Capture(str(tmp_path / "optimizer.betas=[0.9, 0.99]"), "train")
    with capture.step(1):
        tf.constant(1) + 1
    assert [Path(file).suffixes for file in capture.stop()] == [[".xplane", ".pb"]]


def test_a_run_of_a_source_with_words_of_its_own_is_profiled_with_a_tokenizer_made_of_them(folder):
    source = {"type": "induction", "length": 8, "vocabulary": 11}
    model = {"type": "causal_lm", "vocabulary_size": 24}
    words = config.load(runs.write(folder, model=model, data={"source": source, "tokenizer": None}))
    texts = config.load(runs.write(folder))
    assert profiles._cut_short(words, "run", 1, 1).data.tokenizer is None
    assert profiles._cut_short(texts, "run", 1, 1).data.tokenizer == "run"


def test_what_cannot_be_profiled_is_said_in_one_line_and_leaves_nothing(folder, tmp_path):
    with pytest.raises(ValueError, match="--steps must be 1 or more, got 0"):
        profile(folder, steps=0)
    with pytest.raises(ValueError, match="--batch must be 1 or more, got 0"):
        profile(folder, "prefill", batch_size=0)
    with pytest.raises(ValueError, match="--mode decode needs a causal language model, got masked_lm"):
        profile(folder, "decode")
    with pytest.raises(ValueError, match="--mode prefill needs a model that decodes, this one does not"):
        quadratic = {"type": "gau", "key_dim": 8, "divisor": "length"}
        profile(folder, "prefill", model={"type": "causal_lm", "mixer": quadratic})
    with pytest.raises(ValueError, match="needs a config or a model directory, and the folder .* has no config.yaml"):
        profiles.load(str(tmp_path), [])
    with pytest.raises(ValueError, match="--set overrides a config, and .* is a model directory"):
        profiles.load(str(folder), ["train.steps=3"])
    on_jax = config.load(runs.write(folder, strategy={"type": "jax"}))
    with pytest.raises(ValueError, match="profile run/config.yaml with --set strategy.type=one_device"):
        profiles._cut_short(on_jax, "run", 1, 1)
    path = runs.write(folder, model={"depth": 1})
    arguments = ["profile", path, "--out", tmp_path / "out", "--batch", "2"]
    assert "--batch is for prefill and decode" in one_line(runs.command(tmp_path, *arguments))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["stderr", "stdout"]


@pytest.mark.full
def test_the_command_prints_one_object_and_of_a_config_keeps_nothing_unless_asked(folder, tmp_path):
    path = runs.write(folder, model={"type": "causal_lm", "depth": 1})
    status, out, err = runs.command(tmp_path, "profile", path, "--mode", "prefill", "--steps", "2", "--json")
    assert status == 0 and json.loads(out)["mode"] == "prefill"
    assert err.splitlines()[-1] == "--out DIR keeps the trace and latency.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr", "stdout"]
    status, out, err = runs.command(tmp_path, "profile", path, "--mode", "prefill", "--steps", "2", "--out", tmp_path)
    assert (status, out.split()[0]) == (0, "prefill")
    assert json.loads(Path(tmp_path, "latency.json").read_text())["mode"] == "prefill"
