import json

import numpy as np
import pytest

from flash_tf import config
from flash_tf.data import prepared, tokenizers
from flash_tf.data.prepared import Prepared
from flash_tf.data.sources import text_files
from flash_tf.data.stream import EvaluationBatches, WindowStream
from flash_tf.preparing.encoding import Encoder
from flash_tf.preparing.prepare import prepare
from flash_tf.training.inputs import make_cache, make_packing
from flash_tf.training.tasks import objective_of
from tests.data import tfds_fixture
from tests.preparing.here import Here
from tests.training import runs


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A config over four shards of text; a file has 4 windows or so."""
    monkeypatch.setattr(text_files, "SHARD_BYTES", 4000)
    monkeypatch.setattr(prepared, "FILE_BYTES", 256)
    runs.corpus(tmp_path)
    return runs.write(tmp_path, model={"type": "causal_lm"})


def counted(batches) -> list:
    """The windows of batches without their order, and without those that only fill a batch."""
    names = [name for name in ("tokens", "segment_ids") if name in batches[0]]
    found = [list(zip(*(batch[name].tolist() for name in names), strict=True)) for batch in batches]
    return sorted(window for batch in found for window in batch if any(window[0]))


def of_train(experiment, folder, made: Prepared) -> tuple[list, list]:
    """An epoch of both splits, as `train` reads them from text with the same tokenizer."""
    tokenizer = tokenizers.load(made.directory, experiment.model["vocabulary_size"])
    caches = [make_cache(experiment, str(folder), tokenizer, split, lambda *_: None) for split in made.splits]
    packing, windows = made.layout.packing, made.splits["train"].windows
    stream = WindowStream(caches[0], packing, seed=0, limit=windows + 1)
    assert stream.batch(windows, 1)["window"].tolist() == [[1, 0]]
    return counted([stream.batch(0, windows)]), counted(list(EvaluationBatches(caches[1], packing, batch_size=8)))


def of_prepared(made: Prepared) -> tuple[list, list]:
    return tuple(counted([split.read(np.arange(split.windows))]) for split in made.splits.values())


@pytest.mark.parametrize("kind", ["concatenate", "documents"])
def test_windows_equal_the_windows_that_train_makes_of_text(small, tmp_path, kind):
    experiment, do = config.load(small, [f"data.packing={kind}"]), Here()
    counts = prepare(experiment, str(tmp_path / "out"), runs.Lines(), do)
    made = Prepared(str(tmp_path / "out"))
    assert sum(not joins and split == "train" for split, _, joins in do.done) > 2
    assert of_prepared(made) == of_train(experiment, tmp_path, made)
    assert counts["train_documents"] == 80 and counts["train_windows"] == made.splits["train"].windows
    model = type("Model", (), {"align": made.layout.packing.align})
    made.check(make_packing(experiment, objective_of(experiment), model), made.tokenizer)


def test_windows_equal_the_windows_that_train_makes_of_a_tfds_data_set(small, tmp_path):
    texts = [f"the {i}th page \N{EN DASH} of number {i * i}" for i in range(60)]
    tfds_fixture.store("c4/en:3.1.0", tmp_path / "data", {"train": texts, "validation": texts[:9]})
    source = f"{{type: tfds, name: 'c4/en:3.1.0', data_dir: {tmp_path / 'data'}, train_split: 'train[:50]'}}"
    experiment = config.load(small, [f"data.source={source}", "data.tokenizer={train: word}"])
    prepare(experiment, str(tmp_path / "out"), runs.Lines(), Here())
    made = Prepared(str(tmp_path / "out"))
    assert made.splits["train"].documents == 50 and made.splits["train"].bytes == sum(
        len(t.encode()) for t in texts[:50]
    )
    assert of_prepared(made) == of_train(experiment, tmp_path, made)


def test_the_same_command_does_only_what_is_missing(small, tmp_path):
    experiment, whole = config.load(small), Here()
    prepare(experiment, str(tmp_path / "whole"), runs.Lines(), whole)
    tried = []
    for most in (0, 2, None):  # killed before the first unit, and after some
        do, progress = Here(most), runs.Lines()
        try:
            prepare(experiment, str(tmp_path / "out"), progress, do)
        except OSError:
            with pytest.raises(ValueError, match="is not prepared to its end"):
                Prepared(str(tmp_path / "out"))
        tried += do.done
    assert sorted(tried) == sorted(whole.done) and "2 of 5 units of text are there already" in progress.shown()
    again = Here()
    prepare(experiment, str(tmp_path / "out"), runs.Lines(), again)
    assert again.done == []
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes()


def test_a_unit_whose_file_is_gone_is_written_again(small, tmp_path):
    experiment, out = config.load(small), tmp_path / "out"
    prepare(experiment, str(out), runs.Lines(), Here())
    gone = out / "train" / "0000001-00000.windows"
    before, do = gone.read_bytes(), Here()
    gone.unlink()
    prepare(experiment, str(out), runs.Lines(), do)
    assert do.done == [("train", 1, False)] and gone.read_bytes() == before


def test_a_folder_of_other_windows_is_refused_and_unchanged(small, tmp_path):
    prepare(config.load(small), str(tmp_path / "out"), runs.Lines(), Here())
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for override, message in {
        "data.sequence_length=16": r"another packing: .*\"sequence_length\": 32.*give another folder",
        "model.type=masked_lm": "another packing",
        "data.tokenizer={train: word}": "another tokenizer_options",
        "data.source.documents=file": "another source",
    }.items():
        with pytest.raises(ValueError, match=message):
            prepare(config.load(small, [override]), str(tmp_path / "out"), runs.Lines(), Here())
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}


def test_text_without_a_window_and_labelled_examples_are_refused(small, tmp_path):
    with pytest.raises(ValueError, match=r"the train split has no window: it needs a unit of at least 65536 tokens"):
        long = ["data.sequence_length=65536", "train.tokens_per_step=65536"]
        prepare(config.load(small, long), str(tmp_path / "out"), runs.Lines(), Here())
    with pytest.raises(ValueError, match="prepare is for documents"):
        prepare(config.load("recall/flash"), str(tmp_path / "other"), runs.Lines(), Here())
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("size", "options"), [(100, {}), (340, {"whitespace": "keep"}), (300, {"kind": "bpe"}), (60, {"kind": "word"})]
)
def test_many_texts_at_once_get_the_ids_that_they_get_alone(tmp_path, size, options):
    runs.corpus(tmp_path)
    text = (tmp_path / "train.txt").read_text()
    texts = ["", " ", "\ud800 half", "an   old \n line</s> <cls>", "straße ▁ ", text, "a b"]
    tokenizer = tokenizers.train(iter([text]), size, **options)
    for some in (texts, [text for text in texts if "▁" not in text]):
        ids, lengths = Encoder(tokenizer)(some)
        expected = tokenizer.encode(some)
        assert lengths.tolist() == [len(one) for one in expected]
        assert ids.tolist() == np.concatenate(expected).tolist()
    assert Encoder(tokenizer)([])[0].tolist() == []


def test_the_manifest_names_the_source(small, tmp_path):
    experiment = config.load(small)
    prepare(experiment, str(tmp_path / "out"), runs.Lines(), Here())
    about = json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert about["source"] == experiment.data.source and len(about["identity"]) == 64
