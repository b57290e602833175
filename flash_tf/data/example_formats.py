"""Files of labelled examples: which there are, and the records in them."""

import functools
import glob
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

Record = dict[str, Any]


def listed(globs: str | list[str]) -> list[str]:
    """One glob or several as a list."""
    return [globs] if isinstance(globs, str) else list(globs)


def matching(globs: list[str], split: str, source: str) -> list[str]:
    """The files that match globs, in the order of the globs, and within a glob of the paths. `~` is the home folder.

    Raises:
      ValueError: A glob matches none. The message names the split and the source.
    """
    found = []
    for pattern in globs:
        path = os.path.expanduser(pattern)
        there = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))  # a name may have brackets
        if not there:
            got = f"{pattern!r} matches none{seen_from(path)}"
            raise ValueError(f"source {source!r} needs files for {split}, but {got}")
        found += there
    return list(dict.fromkeys(found))


def seen_from(path: str) -> str:
    """The end of a sentence about a path that was not found: the folder from which a relative one was looked up."""
    relative = "://" not in path and not os.path.isabs(os.path.expanduser(path))
    return f" in the working directory {os.getcwd()}" if relative else ""


def with_sizes(paths: list[str]) -> list:
    """Files with their bytes, for a source's identity."""
    return [[path, os.path.getsize(path)] for path in paths]


def checksums(paths: list[str]) -> list[int]:
    """CRC-32 of each file: a label that is corrected does not change the size."""
    stats = ((path, os.stat(path)) for path in paths)
    return [_checksum(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


@functools.cache  # a start asks more than once
def _checksum(path, size, changed):
    del size, changed
    total = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            total = zlib.crc32(block, total)
    return total


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
        except (ValueError, RecursionError) as error:  # of nesting, and of numbers with many digits
            why = getattr(error, "msg", str(error))
            raise ValueError(f"{path}, line {number} needs JSON, got {line.strip()[:40]!r}: {why}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} needs a JSON object, got a {type(record).__name__}")
        yield record


def tab_separated(path: str, keys: list[str] | None = None) -> Iterator[Record]:
    """The lines of a table. Every value is a string. The first line has the keys unless `keys` has other ones."""
    return (record for _, record in table_lines(path, keys))


def table_lines(path: str, keys: list[str] | None = None) -> Iterator[tuple[int, Record]]:
    """As `tab_separated`, each after the number of its line."""
    for number, line in enumerate(_lines(path), 1):
        row = line.rstrip("\r\n").split("\t")  # the module csv refuses fields of more than 128 kB
        if keys is None or (number == 1 and {*row} <= {*keys}):
            keys = row
            if (twice := next((key for key in keys if key and keys.count(key) > 1), None)) is not None:
                raise ValueError(f"{path}, line {number} needs a key for each column, got {twice!r} twice")
        elif row != [""] and len(row) != len(keys):
            raise ValueError(f"{path}, line {number} needs {len(keys)} columns, got {len(row)}")
        elif row != [""]:
            yield number, dict(zip(keys, row, strict=True))


def parquet(path: str) -> Iterator[Record]:
    """The rows of a Parquet file."""
    import pyarrow.parquet  # heavy; comes with TensorFlow Datasets

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096)
        yield from itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a whole Parquet file: {error}") from None


def squad(path: str) -> Iterator[Record]:
    """The questions of a file as SQuAD's, each with its context and the lists `text` and `answer_start` of answers.

    A question without `answers`, as in a test file, has none.
    """
    try:
        articles = json.loads("".join(_lines(path)))["data"]
        for paragraph in (one for article in articles for one in article["paragraphs"]):
            for question in paragraph["qas"]:
                found = {"context": paragraph["context"], **question}
                if "answers" in question:
                    keys = "text", "answer_start"
                    found["answers"] = {key: [one[key] for one in question["answers"]] for key in keys}
                yield found
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} needs the layout of SQuAD's files, got {type(error).__name__}: {error}") from None


def _lines(path):
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} needs UTF-8 text, got byte 0x{error.object[error.start]:02x}") from None


FORMATS = {".jsonl": json_lines, ".tsv": tab_separated, ".parquet": parquet, ".json": squad}
