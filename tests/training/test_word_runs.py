"""A run whose tokenizer is a `tokenizer.json`: trained, resumed, saved as a preset, and a start for another run."""

import numpy as np
import pytest

import flash_tf as ft
from flash_tf.training.restore import restore
from tests.training import runs


@pytest.mark.full
def test_a_run_with_words_is_resumed_restored_saved_and_started_from(tmp_path):
    runs.corpus(tmp_path)
    (tmp_path / "run").mkdir()
    path = runs.write(
        tmp_path, model={"vocabulary_size": 128}, data={"tokenizer": {"train": "word"}}, train={"steps": 2}
    )
    assert "training a tokenizer of 128 words" in runs.train(path, tmp_path / "run", "train.steps=2")
    assert "going on from step 2" in runs.train(path, tmp_path / "run")
    assert (tmp_path / "run/tokenizer.json").is_file()
    trained = restore(str(tmp_path / "run"))
    assert (trained.tokenizer.file_pieces, trained.tokenizer.vocabulary_size) == (119, 128)
    trained.model.save_to_preset(str(tmp_path / "preset"))
    trained.model.save(tmp_path / "model.keras")
    text = (tmp_path / "validation.txt").read_text().splitlines()[0]
    for found in (ft.load(tmp_path / "preset"), ft.load(tmp_path / "model.keras")):
        assert found.tokenizer.fingerprint == trained.tokenizer.fingerprint
        np.testing.assert_array_equal(found.tokenizer.encode([text])[0], trained.tokenizer.encode([text])[0])
        assert found.fill_mask(f"{text} <mask>")[0][0]["text"].startswith(text)
    (tmp_path / "next").mkdir()
    line = runs.train(path, tmp_path / "next", f"init_from={tmp_path / 'preset'}", "train.steps=2")
    assert f"starting from {tmp_path / 'preset'}" in line
    assert (tmp_path / "next/tokenizer.json").read_bytes() == (tmp_path / "run/tokenizer.json").read_bytes()
    with pytest.raises(ValueError, match="data.tokenizer.byte_fallback belongs to train: bpe, got train: word"):
        runs.train(path, tmp_path / "other", "data.tokenizer.byte_fallback=true")
