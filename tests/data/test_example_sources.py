"""Sources of labelled examples: files of every format, TFDS, `datasets` on a disk, and examples handed over."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from flash_tf import config
from flash_tf.data.example_formats import FORMATS
from flash_tf.data.sources import SOURCES
from flash_tf.data.sources.example_files import ExampleFiles
from flash_tf.data.sources.tfds import Tfds
from flash_tf.training import run_directory
from flash_tf.training.given import with_examples

SQUAD = {
    "data": [
        {
            "title": "Owls",
            "paragraphs": [
                {
                    "context": "An owl is a bird.",
                    "qas": [
                        {"id": "1", "question": "What?", "answers": [{"text": "a bird", "answer_start": 10}]},
                        {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ]
}


def read(source, split="train"):
    return [example for shard in source.shards(split) for example in source.examples(split, shard)]


def test_a_file_is_read_by_the_end_of_its_name(tmp_path):
    rows = [{"text": 'a "b', "label": 1}, {"text": "ü", "label": 0}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (tmp_path / "b.tsv").write_text('text\tlabel\na "b\t1\nü\t0\n', "utf-8")
    pandas.DataFrame(rows).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "d.json").write_text(json.dumps(SQUAD))
    source = ExampleFiles([str(tmp_path / "a.*"), str(tmp_path / "c.*")], str(tmp_path / "*.tsv"))
    assert read(source) == rows + rows
    assert read(source, "validation") == [{**row, "label": str(row["label"])} for row in rows]
    one, none = read(ExampleFiles(str(tmp_path / "d.json"), ""))
    assert one["context"] == "An owl is a bird." and one["answers"] == {"text": ["a bird"], "answer_start": [10]}
    assert none["answers"] == {"text": [], "answer_start": []} and none["id"] == "2"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": 1}\n{"te', "a.jsonl, line 2 needs JSON, got '{\"te'"),
        ("a.jsonl", b"[1]\n", "a.jsonl, line 1 needs a JSON object, got a list"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl needs UTF-8 text, got byte 0xff"),
        ("a.tsv", b"text\tlabel\na\n", "a.tsv, line 2 needs 2 columns, got 1"),
        ("a.tsv", b"text\tlabel\ttext\na\tb\tc\n", "a.tsv, line 1 needs a key for each column, got 'text' twice"),
        (
            "a.json",
            b'{"data": [{"title": "x"}]}',
            "a.json needs the layout of SQuAD's files, got KeyError: 'paragraphs'",
        ),
        ("a.parquet", b"no", "a.parquet is not a whole Parquet file"),
        ("a.txt", b"text", "a.txt needs one of the endings .jsonl, .tsv, .parquet, .json"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        read(ExampleFiles(str(tmp_path / name), ""))
    assert said in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="files for train, but 'none' matches none in the working directory /"):
        ExampleFiles("none", "").shards("train")


def test_a_file_whose_name_has_brackets_is_read(tmp_path):
    (tmp_path / "a [1].jsonl").write_text('{"text": "good"}\n')
    assert read(ExampleFiles(str(tmp_path / "a [1].jsonl"), "")) == [{"text": "good"}]


def store(folder, name, features, **splits):
    """Writes a dataset of TFDS with its real features."""
    path, version = name.split(":")
    builder, _, part = path.partition("/")
    features = tfds.features.FeaturesDict(features)
    made = lambda rows: tf.data.Dataset.from_generator(lambda: rows, output_signature=features.get_tensor_spec())  # noqa: E731
    tfds.dataset_builders.store_as_tfds_dataset(
        name=builder,
        config=part or None,
        version=version,
        features=features,
        split_datasets={split: made(rows) for split, rows in splits.items()},
        data_dir=folder,
        disable_shuffling=True,
    )


TEXT = tfds.features.Text()


def test_examples_of_tfds_are_records_of_text_and_numbers(tmp_path):
    features = {"sentence": TEXT, "label": tfds.features.ClassLabel(num_classes=2), "idx": np.int32}
    rows = [{"sentence": "good ü", "label": 1, "idx": 0}, {"sentence": "bad", "label": 0, "idx": 1}]
    store(tmp_path, "glue/sst2:2.0.0", features, train=rows, validation=rows[:1])
    source = Tfds("glue/sst2", data_dir=str(tmp_path))
    assert read(source) == rows and read(source, "validation") == rows[:1]


def test_a_dataset_on_a_disk_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = SOURCES.build({"type": "hf_datasets", "path": str(tmp_path)})
    with pytest.raises(ImportError, match="^source 'hf_datasets' needs the package datasets: pip install datasets$"):
        source.shards("train")


@pytest.mark.full
def test_a_dataset_on_a_disk_is_read_by_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}, {"text": "c", "label": 1}]
    both = {"train": datasets.Dataset.from_list(rows), "dev": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "d")
    options = {"type": "hf_datasets", "path": str(tmp_path / "d"), "examples_per_shard": 2}
    source = SOURCES.build({**options, "validation_split": "dev"})
    assert source.shards("train") == ["train[0:2]", "train[2:3]"]
    assert read(source) == rows and read(source, "validation") == rows[:1]
    assert source.identity() == SOURCES.build({**options, "validation_split": "dev"}).identity()
    with pytest.raises(ValueError, match="has no validation split 'validation'; its splits are: train, dev"):
        SOURCES.build(options).shards("validation")
    with pytest.raises(ValueError, match="source 'hf_datasets' needs a folder of save_to_disk"):
        SOURCES.build({**options, "path": str(tmp_path)}).shards("train")
    datasets.DatasetDict({**both, "test": datasets.Dataset.from_list([])}).save_to_disk(tmp_path / "e")
    source = SOURCES.build({**options, "path": str(tmp_path / "e"), "validation_split": "dev"})
    assert read(source) == rows and read(source, "validation") == rows[:1]


def handed(experiment, folder, dataset):
    """The config of a run with examples."""
    with with_examples(experiment, str(folder), dataset) as (made, _):
        return made


def test_examples_that_are_handed_over_are_kept_in_the_run(tmp_path):
    experiment = config.load("film_reviews/flash")
    rows = [{"text": "ü", "label": np.int64(1)}, {"text": b"b", "label": 0}]
    batched = tf.data.Dataset.from_tensor_slices({"text": ["x", "y"], "label": [0, 1]})
    source = SOURCES.build(handed(experiment, tmp_path, {"train": iter(rows), "validation": batched}).data.source)
    assert read(source) == [{"text": "ü", "label": 1}, {"text": "b", "label": 0}]
    assert read(source, "validation") == [{"text": "x", "label": 0}, {"text": "y", "label": 1}]
    assert Path(source.shards("train")[0]) == tmp_path / "examples/train.jsonl"
    refused = {
        "dataset needs the splits train, validation, got train": {"train": rows},
        "train, example 1 must be a dictionary, got a tuple": {"train": [("a", 1)], "validation": []},
        "train, example 1 needs JSON values: got a object": {"train": [{"a": object()}], "validation": []},
    }
    for said, dataset in refused.items():
        with pytest.raises(ValueError, match=said):
            handed(experiment, tmp_path, dataset)


def test_a_run_that_has_begun_keeps_its_examples(tmp_path):
    experiment, rows = config.load("film_reviews/flash"), [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    given = {"train": rows, "validation": rows[:1]}
    handed(experiment, tmp_path, {"train": rows[:1], "validation": rows})  # a start that failed
    with run_directory.begun(str(tmp_path), handed(experiment, tmp_path, given), "a tokenizer"):
        pass  # it is killed before its first step
    source = SOURCES.build(handed(experiment, tmp_path, given).data.source)
    swapped = {"train": [{**one, "label": 1 - one["label"]} for one in rows], "validation": rows[:1]}
    for other in ({"train": iter(()), "validation": iter(())}, swapped):
        with pytest.raises(ValueError, match="holds a run with other examples"):
            handed(experiment, tmp_path, other)
    assert read(source) == rows and read(source, "validation") == rows[:1]
    shutil.copytree(tmp_path, tmp_path / "other", ignore=shutil.ignore_patterns("examples"))
    with pytest.raises(ValueError, match="holds a run with other examples"):
        handed(experiment, tmp_path / "other", given)
    assert not (tmp_path / "other/examples").exists()


def test_a_process_that_does_not_own_the_run_changes_none_of_its_examples(tmp_path):
    experiment, rows = config.load("film_reviews/flash"), [{"text": "a", "label": 0}]
    given, other = ({"train": some, "validation": some} for some in (rows, rows * 2))
    with with_examples(experiment, str(tmp_path), given) as (made, _):  # it has not begun: no fingerprint is there
        with pytest.raises(ValueError, match="is in use by process"):
            handed(experiment, tmp_path, other)
        assert read(SOURCES.build(made.data.source)) == rows
    workers = config.load("film_reviews/flash", ["strategy.type=multi_worker"])
    with pytest.raises(ValueError, match="need one process: workers read them from files"):
        handed(workers, tmp_path, given)


def test_a_test_file_of_questions_needs_no_answers(tmp_path):
    question = {"id": "1", "question": "who"}
    article = {"paragraphs": [{"context": "they", "qas": [question]}]}
    (tmp_path / "test.json").write_text(json.dumps({"data": [article]}))
    assert list(FORMATS[".json"](str(tmp_path / "test.json"))) == [{"context": "they", **question}]
