"""The relative standard deviation of gradient norms, of records whose numbers are known."""

import json

import pytest

from benchmarks import gradient_stability, result_files


def run(folder, norms):
    folder.mkdir()
    rows = [{"step": i + 1, "loss": 3.0, "gradient_norm": norm} for i, norm in enumerate(norms)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_the_table_has_deviation_over_mean_of_each_run(tmp_path, capsys):
    steady, wild = run(tmp_path / "steady", [1.0, 3.0]), run(tmp_path / "wild", [9.0, 1.0, 1.0, 4.0])
    file = tmp_path / "found.jsonl"
    assert gradient_stability.main([f"a={steady}", f"b={wild}", "--from", "1", "--results", str(file)]) == 0
    rows = result_files.read(file)
    assert [(row["run"], row["mean"], row["relative"]) for row in rows] == [
        ("a", 2.0, pytest.approx(0.5)),
        ("b", 3.75, pytest.approx((10.6875) ** 0.5 / 3.75)),
    ]
    assert capsys.readouterr().out.splitlines()[1].split() == ["a", "2", "2", "1", "0.50"]


def test_the_first_steps_may_be_left_out(tmp_path):
    wild = run(tmp_path / "wild", [9.0, 1.0, 3.0])
    file = tmp_path / "found.jsonl"
    gradient_stability.main([wild, "--from", "2", "--results", str(file)])
    assert result_files.read(file)[0]["relative"] == pytest.approx(0.5)


def test_a_run_of_one_step_has_no_deviation(tmp_path):
    with pytest.raises(ValueError, match="needs two recorded steps or more from step 1 on, has 1"):
        gradient_stability.main([run(tmp_path / "short", [1.0])])


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_a_step_without_a_norm_is_named(tmp_path, bad):
    with pytest.raises(ValueError, match="the gradient of step 2 needs a finite norm above zero"):
        gradient_stability.main([run(tmp_path / "bad", [1.0, bad, 1.0])])
