"""The command's own speed and starts, of a tiny model."""

import pytest

from benchmarks import result_files, train_command

TINY = ["--configs", "quickstart", "--lengths", "64", "--tokens", "128", "--set", "model.depth=1"]


def test_a_line_that_is_half_written_is_no_record(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert train_command._records(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "quickstart-64").mkdir()
    with pytest.raises(ValueError, match="is there already: OUT must be another folder"):
        train_command.main([str(tmp_path), *TINY, "--results", str(tmp_path / "rows.jsonl")])


@pytest.mark.full
def test_a_training_is_timed_and_started_again(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    assert train_command.main([str(tmp_path / "out"), *TINY, "--steps", "20", "--again", "--results", str(rows)]) == 0
    (row,) = result_files.read(rows)
    rates = row["tokens_per_second_of_loops"][1:]
    assert row["steps"] >= 20 and min(rates) <= row["tokens_per_second"] <= max(rates)
    assert 0 < row["seconds_to_first_step_again"] and 0 < row["seconds_to_first_step"]
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["quickstart", "64"]


@pytest.mark.full
def test_a_training_that_fails_is_said_and_the_status_is_1(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    bad = [str(tmp_path / "out"), *TINY, "--set", "optimizer.learning_rate=-1", "--results", str(rows)]
    assert train_command.main(bad) == 1 and result_files.read(rows) == []
