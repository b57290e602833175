"""What all benchmarks share."""

import argparse
import json

import pytest

from benchmarks import device
from flash_tf.training import progress


def results(path, commit="1234567"):
    args = argparse.Namespace(json=str(path), commit=commit, n=1)
    return device.Results(args, "name", device="a device", packages=("numpy", "nothing"))


def test_a_result_file_holds_its_rows_as_soon_as_they_are_measured(tmp_path):
    path = tmp_path / "new" / "result.json"
    found = results(path)
    assert json.loads(path.read_text())["rows"] == []
    found.add({"n": 512})
    written = json.loads(path.read_text())
    assert written["rows"] == [{"n": 512}]
    assert (written["device"], written["commit"], written["flags"]) == ("a device", "1234567", {"n": 1})
    assert written["versions"].keys() == {"python", "numpy"}


def test_a_result_that_cannot_be_written_is_known_before_anything_is_timed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        results(tmp_path / "file" / "result.json")


def test_rows_of_a_file_are_kept_by_a_script_that_goes_on_and_no_others(tmp_path):
    path = tmp_path / "result.json"
    assert device.kept(None, "a device") == device.kept(str(path), "a device") == []
    results(path).add({"n": 512})
    assert device.kept(str(path), "a device") == [{"n": 512}] and [*tmp_path.iterdir()] == [path]
    with pytest.raises(ValueError, match="has rows of a device, this would add some of another: name another file"):
        device.kept(str(path), "another")
    for text in ("", "[]", "{}", '{"rows": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no result to go on with"):
            device.kept(str(path), "a device")


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
