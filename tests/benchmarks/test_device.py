"""What all benchmarks share."""

import pytest

from benchmarks import device
from flash_tf.training import progress


def test_a_timing_is_its_median_and_what_follows_from_it():
    found = device.timing([9.0, 10.0, 1000.0], tokens=500, flops=989e10, device="NVIDIA H200")
    assert (found["median_ms"], found["tokens_per_second"], found["steps"]) == (10, 50_000, 3)
    assert found["mfu"] == pytest.approx(1)
    assert device.timing([1.0, 1.0], tokens=1, flops=1, device="a device")["mfu"] is None
    assert device.timing([1.0, 1.0], tokens=1, flops=None, device="NVIDIA H200")["mfu"] is None


def test_peaks_are_those_that_training_shows():
    assert device.PEAKS == progress.PEAKS
    assert device.peak_flops("NVIDIA A100-SXM4-80GB") == progress.peak_flops("A100-SXM4", "mixed_bfloat16", 1)


def test_a_length_must_divide_the_tokens_of_a_step():
    assert device.batch_size(512, 65_536) == 128
    for n in (0, -512, 500, 131_072):
        with pytest.raises(ValueError, match=rf"must divide --tokens \(65536\), got {n}"):
            device.batch_size(n, 65_536)


def test_a_line_of_a_table_has_a_dash_for_what_is_not_known():
    assert device.table_line(("lm", 512, None), (4, 6, 4)) == "lm     512   –"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'jax'", name="jax"), "it needs the package jax"),
        (
            ImportError("cannot import name '_jax' from 'jax._src.lib'", name="jax._src.lib"),
            "it needs another version of jax._src.lib: cannot import name '_jax' from 'jax._src.lib'",
        ),
        (ValueError("two\nlines"), "two lines"),
        (FileNotFoundError(2, "No such file or directory", "step.hlo.pb"), "No such file or directory: step.hlo.pb"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_script_cannot_do_is_one_line(monkeypatch, error, said):
    def main():
        raise error

    monkeypatch.setattr("sys.argv", ["benchmarks/run_compiled.py"])
    with pytest.raises(SystemExit) as ended:
        device.program(main)
    assert ended.value.code == f"run_compiled: {said}"
