"""Labelled examples in files: JSON lines, tab-separated tables, or Parquet."""

import csv
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from flash_tf.data.sources import SOURCES

Record = dict[str, Any]


@SOURCES.register("example_files")
class ExampleFiles:
    """The examples of all files that match the globs, in the order of the globs, and within a glob of the paths.

    The end of a name says the format: `.jsonl`, a JSON object on each line; `.tsv`, a table with its keys in the first
    line and without quotes, as GLUE's; `.parquet`; `.json`, the questions of a file in SQuAD's layout. Text is UTF-8. A
    shard is a file.

    Args:
      train: A glob or a list of globs. `~` is the home folder.
      validation: The same for the validation split.
    """

    labelled = True
    counts_words = False

    def __init__(self, train: str | list[str], validation: str | list[str]):
        globs = {"train": train, "validation": validation}
        self.globs = {split: [one] if isinstance(one, str) else list(one) for split, one in globs.items()}

    def shards(self, split: str) -> list[str]:
        found = []
        for pattern in self.globs[split]:
            there = sorted(glob.glob(os.path.expanduser(pattern)))
            if not there:
                raise ValueError(f"source 'example_files' needs files for {split}, but {pattern!r} matches none")
            found += there
        for path in found:
            format_of(path)
        return list(dict.fromkeys(found))

    def examples(self, split: str, shard: str) -> Iterator[Record]:
        return format_of(shard)(shard)

    def identity(self) -> dict:
        return {split: [[path, os.path.getsize(path)] for path in self.shards(split)] for split in self.globs}


def format_of(path: str) -> Callable[[str], Iterator[Record]]:
    """The reader of a file, by the end of its name."""
    if (reader := FORMATS.get(os.path.splitext(path)[1])) is None:
        raise ValueError(f"{path} needs one of the endings {', '.join(FORMATS)}")
    return reader


def json_lines(path: str) -> Iterator[Record]:
    """The JSON object of each line that is not empty."""
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} needs JSON, got {line.strip()[:40]!r}: {error.msg}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} needs a JSON object, got a {type(record).__name__}")
        yield record


def tab_separated(path: str) -> Iterator[Record]:
    """The lines of a table. Every value is a string."""
    rows = csv.reader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    keys = next(rows, None)
    for number, row in enumerate(rows, 2):
        if row and len(row) != len(keys):
            raise ValueError(f"{path}, line {number} needs {len(keys)} columns, got {len(row)}")
        if row:
            yield dict(zip(keys, row, strict=True))


def parquet(path: str) -> Iterator[Record]:
    """The rows of a Parquet file."""
    import pyarrow.parquet  # heavy; comes with TensorFlow Datasets

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096)
        yield from itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a whole Parquet file: {error}") from None


def squad(path: str) -> Iterator[Record]:
    """The questions of a file as SQuAD's, each with its context and the lists `text` and `answer_start` of answers."""
    try:
        articles = json.loads("".join(_lines(path)))["data"]
        for paragraph in (one for article in articles for one in article["paragraphs"]):
            for question in paragraph["qas"]:
                answers = {key: [one[key] for one in question["answers"]] for key in ("text", "answer_start")}
                yield {"context": paragraph["context"], **question, "answers": answers}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} needs the layout of SQuAD's files, got {type(error).__name__}: {error}") from None


def _lines(path):
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} needs UTF-8 text, got byte 0x{error.object[error.start]:02x}") from None


FORMATS = {".jsonl": json_lines, ".tsv": tab_separated, ".parquet": parquet, ".json": squad}
