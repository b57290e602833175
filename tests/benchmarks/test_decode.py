"""The benchmark of decoding, on a tiny model."""

import pytest

from benchmarks import decode, plots, result_files

TINY = ["--set", "model.width=32", "--set", "model.depth=1", "--set", "model.vocabulary_size=64"]


@pytest.mark.full
def test_states_of_each_length_are_timed_in_turns_and_drawn(tmp_path, capsys):
    path, models = tmp_path / "decode.jsonl", ["flash", "flash_quad"]
    sizes = ["--contexts", "64", "512", "--tokens", "2", "--rounds", "3", "--results", str(path)]
    assert decode.main(["--models", *models, *TINY, *sizes]) == 0
    rows = result_files.read(path)
    assert [(row["model"], row["context"]) for row in rows] == [(m, n) for m in models for n in (64, 512)]
    assert all(row["rounds"] == 3 and row["ms_per_token"] > 0 for row in rows)
    short, long, quad_short, quad_long = (row["state_bytes"] for row in rows)
    assert short == long
    per_token = 2 * (128 + 2 * 32)  # keys and values in bfloat16
    assert quad_long - quad_short == (512 - 64) * per_token
    assert plots.main(["--results", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "decode_cpu.png").stat().st_size > 10_000


def test_sizes_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="--rounds must be 2 or more"):
        decode.main(["--rounds", "1"])
    with pytest.raises(ValueError, match="--tokens must be 1 or more"):
        decode.main(["--tokens", "0"])
