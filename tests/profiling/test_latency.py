"""The figures of a capture."""

import json

import pytest

from flash_tf import config, model_stats, owned_files
from flash_tf.profiling import latency
from flash_tf.profiling.latency import Work, summarize
from flash_tf.profiling.trace import Step, Trace
from flash_tf.training import modelling, profile
from tests.training import runs


def test_figures_are_the_median_the_ninetieth_percentile_and_rates_by_the_median():
    steps = tuple(Step(number=i, total=i * 10**9, device=i * 10**9, input=0, host=0) for i in range(1, 12))
    work = Work(mode="train", model="m", tokens=30, flops=1200, replicas=1, device="d", peak=4e5, peak_of="sheet")
    found = summarize(Trace(steps=steps, devices=1, operations={}, program_bytes=None, peak=None), work, {})
    assert found["median"]["total_ms"] == pytest.approx(6)
    assert found["p90"]["total_ms"] == pytest.approx(10)
    assert found["tokens_per_second"] == pytest.approx(30 / 6e-3)
    assert found["mfu"] == pytest.approx(1200 / 6e-3 / 4e5)


def test_what_the_profiler_costs_the_host_is_in_no_rate_and_no_verdict():
    step = Step(number=1, total=180 * 10**9, device=30 * 10**9, input=10**9, host=149 * 10**9)
    work = Work(mode="train", model="m", tokens=64, flops=1200, replicas=1, device="d", peak=4e5, peak_of="sheet")
    trace = Trace(steps=(step,), devices=1, operations={}, program_bytes=None, peak=None)
    assert summarize(trace, work, {})["bound"] == "host"
    found = summarize(trace, work, {}, untraced=33.0)
    own = {"total_ms": 33.0, "device_ms": 30.0, "host_ms": 2.0, "input_ms": 1.0}
    assert found["untraced"] == pytest.approx(own)
    assert (found["bound"], found["median"]["total_ms"]) == ("compute", 180.0)
    assert found["device_share"] == pytest.approx(30 / 33) and found["tokens_per_second"] == pytest.approx(64 / 33e-3)
    assert "untraced                 33.00 ms     30.00 ms      2.00 ms      1.00 ms" in latency.as_text(found)
    assert latency.headline(found).startswith("33.00 ms a step, compute-bound")
    faster = summarize(trace, work, {}, untraced=15.5)["untraced"]  # the profiler slowed the device too
    assert faster == pytest.approx({"total_ms": 15.5, "device_ms": 15.0, "host_ms": 0.0, "input_ms": 0.5})


def test_waits_of_few_steps_count_without_the_profiler_too():
    calm = Step(number=1, total=10 * 10**9, device=10 * 10**9, input=0, host=0)
    waiting = Step(number=2, total=50 * 10**9, device=10 * 10**9, input=40 * 10**9, host=0)
    work = Work(mode="train", model="m", tokens=64, flops=1200, replicas=1, device="d", peak=4e5, peak_of="sheet")
    trace = Trace(steps=(calm,) * 6 + (waiting,) * 2, devices=1, operations={}, program_bytes=None, peak=None)
    for untraced in (None, 20.0):
        found = summarize(trace, work, {}, untraced=untraced)
        assert (found["bound"], found["input_share"]) == ("input", pytest.approx(0.5))


def test_a_training_step_costs_what_describe_says_of_its_tokens():
    read = modelling.with_masking(config.load("mlm_c4/flash"))
    with model_stats.without_weights():
        model = modelling.make_model(read)
    said = model_stats.describe(read, model, modelling.predicted(read))
    tokens = said["batch_size"] * said["sequence_length"]
    found = modelling.training_flops_per_step(read, model)
    assert found == pytest.approx(said["training_flops_per_token"] * tokens)
    assert found == pytest.approx(3 * said["forward_flops_per_token"] * tokens)


def test_figures_take_the_place_of_older_ones_and_of_no_other_file(tmp_path):
    steps = (Step(number=1, total=10**9, device=10**9, input=0, host=0),)
    work = Work(mode="train", model="m", tokens=1, flops=1, replicas=1, device="d", peak=None, peak_of="")
    found = summarize(Trace(steps=steps, devices=1, operations={}, program_bytes=None, peak=None), work, {})
    latency.write(found, str(tmp_path))
    (tmp_path / owned_files.MANIFEST).unlink()  # as of a version that wrote none
    latency.write({**found, "mode": "decode"}, str(tmp_path))
    assert json.loads((tmp_path / "latency.json").read_text())["mode"] == "decode"
    (tmp_path / "latency.json").write_text("{}")
    for refused in (latency.check_folder, lambda folder: latency.write(found, folder)):
        with pytest.raises(ValueError, match="holds latency.json, which has changed since flash-tf profile wrote it"):
            refused(str(tmp_path))
    assert (tmp_path / "latency.json").read_text() == "{}"


def test_a_model_of_several_mixers_is_called_by_all_of_them(tmp_path):
    mixers = [{"type": "linear_attention", "heads": 2}, {"type": "self_attention", "heads": 2}]
    loaded = config.load(runs.write(tmp_path, model={"type": "causal_lm", "mixer": mixers}))
    work = profile.step_work(loaded, "decode", flops=1, tokens=1, replicas=1)
    assert work.model == "causal_lm, mixer linear_attention, self_attention"
