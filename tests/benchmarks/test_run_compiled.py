"""`benchmarks.run_compiled` of artifacts that decode."""

import pytest

from benchmarks import result_files
from flash_tf import config
from flash_tf.compiling import artifact
from flash_tf.compiling.programs import Experiment
from tests.compiling import exports

N, ROWS = 128, 2
SIZES = [
    "model.width=16",
    "model.depth=1",
    "model.vocabulary_size=64",
    f"data.sequence_length={N}",
    f"train.tokens_per_step={N}",
]


def timed(folder, model, mixer):
    """What the runner prints of a tiny model's artifact, by name, and its rows."""
    experiment = Experiment(*artifact.resolve(config.load(f"lm_wiki40b/{model}", [*SIZES, f"model.mixer={mixer}"])))
    artifact.export(f"lm_wiki40b/{model}", experiment, str(folder), None, lambda line: None, decode_batch=ROWS)
    result = folder.parent / "result.jsonl"
    status, out, err = exports.run(folder, "--steps", 10, "--results", result)
    assert status == 0, err
    assert err.splitlines()[-1].startswith("compiling its decoding for ")
    return dict(line.split("  ", 1) for line in out.splitlines()), result_files.read(result)


@pytest.mark.full
def test_decoding_is_timed_after_short_and_long_texts_where_the_state_is_constant(tmp_path):
    printed, (step, *found) = timed(tmp_path / "flash", "flash", "{type: flash, chunk_size: 8, key_dim: 8}")
    assert step["n"] == N and [row["context"] for row in found] == [1024, 65_536]
    for row in found:
        wanted = {"program": "decode", "config": "lm_wiki40b/flash", "batch": ROWS, "calls": 10, "tokens": ROWS * 64}
        assert wanted.items() <= row.items()
        assert row["peak_bytes"] > 4 * row["parameters"] and row["quartiles_ms"][0] <= row["ms_per_token"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * ROWS / row["ms_per_token"])
        line = printed[f"decode {row['context']:,}"]
        assert f"{row['ms_per_token']:.3f} ms a token" in line and f"batch {ROWS}, " in line


@pytest.mark.full
def test_decoding_is_timed_where_the_state_counts_too(tmp_path):
    mixer = "{type: flash, chunk_size: 8, key_dim: 8, overlapping: true}"
    _, (_, *found) = timed(tmp_path / "flash", "flash", mixer)
    assert [row["context"] for row in found] == [1024, 65_536] and all(row["ms_per_token"] > 0 for row in found)


@pytest.mark.full
def test_decoding_is_timed_at_the_end_of_its_capacity_where_the_state_grows(tmp_path):
    printed, (_, row) = timed(tmp_path / "transformer", "transformer_plus_plus", "{type: self_attention, heads: 2}")
    assert (row["context"], row["batch"]) == (N - 64, ROWS)
    assert f"{row['tokens_per_second']:,.0f} tokens/s" in printed[f"decode {N - 64}"]
