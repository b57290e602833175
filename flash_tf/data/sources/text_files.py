"""Text files, on a disk or in a bucket: plain text or JSON lines, compressed or not."""

import glob
import gzip
import io
import itertools
import json
import lzma
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal

from flash_tf.data.example_formats import seen_from
from flash_tf.data.sources import SOURCES

SHARD_BYTES = 16 << 20
OPENERS = {".gz": gzip.open, ".xz": lzma.open}
# ` = Title = ` with a blank line after it. ` = = Section = = ` does not count, nor do table rows of this form.
HEADING = re.compile(rb" ?= [^=](.*[^=])? = ?\r?\n?")

# Whether a line begins a document, from the line and the one after it.
BEGINS: dict[str, Callable[[bytes, bytes], bool]] = {
    "file": lambda line, following: False,
    "line": lambda line, following: True,
    "key": lambda line, following: True,
    "heading": lambda line, following: bool(HEADING.fullmatch(line)) and not following.strip(),
}


@dataclass(frozen=True)
class Span:
    """The documents of a file that begin at byte `start` or later, and before byte `stop`."""

    path: str
    start: int
    stop: float


@SOURCES.register("text_files")
class TextFiles:
    """The documents of all files that match the globs, in the order of the globs, and within a glob of the paths.

    Files are UTF-8; `.gz` and `.xz` are unpacked. Documents without text are left out, as are empty files. A shard is a
    range of 16 MB of a plain file with several documents, or several small files of 16 MB together. Any other file is
    one shard.

    Args:
      train: A glob or a list of globs. `~` is the home folder, `gs://` a bucket.
      validation: The same for the validation split.
      documents: The unit of a document: a `file`, a `line`, the string under `key` of each line's JSON object, or the
        text from one `heading` ` = Title = ` to the next, as in WikiText.
      key: The JSON key for documents of type `key`, by default "text".
      counts_words: Whether an evaluation also gives the perplexity per word.
    """

    def __init__(
        self,
        train: str | list[str],
        validation: str | list[str],
        documents: Literal["file", "line", "key", "heading"] = "file",
        key: str | None = None,
        counts_words: bool = False,
    ):
        globs = {"train": train, "validation": validation}
        self.globs = {split: [one] if isinstance(one, str) else list(one) for split, one in globs.items()}
        if key is not None and documents != "key":
            raise ValueError(f"source 'text_files' reads key {key!r} only with documents: key, got {documents}")
        self.document = documents
        self.key = key or "text"
        self.counts_words = counts_words
        self._found: dict[str, dict[str, int]] = {}  # by split: listing a bucket takes long
        self._cut: dict[str, dict[str, list[Span]]] = {}

    def shards(self, split: str) -> list[str]:
        shards = self._shards(split)
        if not any(True for shard in shards for _ in self.documents(split, shard)):  # stops at the first document
            raise ValueError(
                f"source 'text_files' needs text for {split}, found none in {', '.join(self.globs[split])}"
            )
        return list(shards)

    def documents(self, split: str, shard: str) -> Iterator[str]:
        for span in self._shards(split)[shard]:
            for offset, document in _documents(span, BEGINS[self.document]):
                text = _decode(span.path, offset, document)
                if text.strip() and self.document == "key":
                    text = _value(span.path, offset, text, self.key)
                if text.strip():
                    yield text

    def identity(self) -> dict:
        files = {split: [[path, size] for path, size in self._files(split).items()] for split in self.globs}
        return {**files, "documents": self.document, "key": self.key}

    def _shards(self, split: str) -> dict[str, list[Span]]:
        if split not in self._cut:
            self._cut[split] = self._make_shards(split)
        return self._cut[split]

    def _make_shards(self, split: str) -> dict[str, list[Span]]:
        shards, room = [], 0
        for path, size in self._files(split).items():
            count = 1 if self.document == "file" or _opener(path) else math.ceil(size / SHARD_BYTES)
            ends = [size * i // count for i in range(count)] + [math.inf]  # the text of a packed file may be longer
            for start, stop in itertools.pairwise(ends):
                if room < size // count:
                    shards.append([])
                    room = SHARD_BYTES
                shards[-1].append(Span(path, start, stop))
                room -= size // count
        return {f"{split}-{i:05d}-of-{len(shards):05d}": shard for i, shard in enumerate(shards)}

    def _files(self, split: str) -> dict[str, int]:
        """Paths and sizes in bytes; ValueError for a glob without a file or with empty files alone."""
        if split not in self._found:
            self._found[split] = {}
            for pattern in self.globs[split]:
                self._found[split].update(_matches(split, pattern))
        return self._found[split]


class StoredBytes(io.RawIOBase):
    """A file of `tf.io.gfile` as a raw stream for Python's readers.

    The lines of a GFile lack carriage returns, so they do not tell the place of a byte in the file.
    """

    def __init__(self, path: str):
        import tensorflow as tf

        self._file = tf.io.gfile.GFile(path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._file.seek(offset, whence=whence)
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


def sizes(pattern: str) -> dict[str, int]:
    """The files that match a glob, in the order of their paths, with their bytes. A path that exists is no glob."""
    import tensorflow as tf

    path = os.path.expanduser(pattern)
    if "**" in path and "://" in path:
        raise ValueError(f"a bucket's files are listed by one folder at a time: {pattern} needs a glob without **")
    if tf.io.gfile.exists(path):
        found = [path]
    else:
        found = sorted(glob.glob(path, recursive=True) if "**" in path else tf.io.gfile.glob(path))
    stats = {path: tf.io.gfile.stat(path) for path in found}
    return {path: stat.length for path, stat in stats.items() if not stat.is_directory}


def _matches(split: str, pattern: str) -> dict[str, int]:
    import tensorflow as tf

    try:
        found, folder = sizes(pattern), tf.io.gfile.isdir(os.path.expanduser(pattern))
    except tf.errors.OpError as error:
        raise OSError(f"the files {pattern} for {split} cannot be listed: {error.message}") from None
    if not found:
        files = f"{pattern.rstrip('/')}/*"
        got = f"is a folder: its files are {files!r}" if folder else f"matches none{seen_from(pattern)}"
        raise ValueError(f"source 'text_files' needs files for {split}, but {pattern!r} {got}")
    if not any(found.values()):
        raise ValueError(f"{min(found)} is empty")
    return {path: size for path, size in found.items() if size}


def _opener(path: str) -> Callable[..., IO[bytes]] | None:
    return OPENERS.get(os.path.splitext(path)[1])


def _lines(path: str, start: int) -> Iterator[tuple[int, bytes]]:
    """Lines that begin at byte `start` of the unpacked file or later, each with the offset of its first byte."""
    import tensorflow as tf

    try:
        with io.BufferedReader(StoredBytes(path), 1 << 20) as stored:
            file = opener(stored) if (opener := _opener(path)) else stored
            if start:  # a line that begins before `start` does not belong to this span
                file.seek(start - 1)
                start += len(file.readline()) - 1
            for line in file:
                yield start, line
                start += len(line)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole compressed file: {error}") from None
    except tf.errors.OpError as error:
        raise OSError(f"{path} cannot be read: {error.message}") from None


def _documents(span: Span, begins: Callable[[bytes, bytes], bool]) -> Iterator[tuple[int, bytes]]:
    """Documents of a span, each with the offset of its first byte. The last may end beyond the span."""
    first, document, ours = 0, [], span.start == 0  # a file's first line always begins a document
    lines = itertools.chain(_lines(span.path, span.start), [(0, b"")])
    for (offset, line), (_, following) in itertools.pairwise(lines):
        if begins(line, following):
            if document:
                yield first, b"".join(document)
            if offset >= span.stop:
                return
            first, document, ours = offset, [], True
        if ours:
            document.append(line)
    if document:
        yield first, b"".join(document)


def _decode(path: str, offset: int, document: bytes) -> str:
    """The text without a byte order mark; ValueError with the first byte that is not text."""
    try:
        text = document.decode("utf-8")
        bad = document.find(b"\0")
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        raise ValueError(f"{path} needs UTF-8 text, got byte 0x{document[bad]:02x} at byte {offset + bad}")
    return text.removeprefix("\ufeff")


def _value(path: str, offset: int, text: str, key: str) -> str:
    """The string under `key` in a line's JSON object; ValueError with the line's number without one."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter from nesting, the former from numbers of many digits too
        why = getattr(error, "msg", str(error))
        raise ValueError(f"{_place(path, offset)} needs JSON, got {text.strip()[:40]!r}: {why}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{_place(path, offset)} needs a JSON object, got a {type(record).__name__}")
    if key not in record:
        raise ValueError(f"{_place(path, offset)} has no key {key!r}; its keys are: {', '.join(record)}")
    if not isinstance(record[key], str):
        raise ValueError(f"{_place(path, offset)} needs a string under {key!r}, got {record[key]!r}")
    return record[key].encode("utf-8", "replace").decode()  # half a surrogate pair becomes "?"


def json_lines(path: str, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The strings under `keys` of each line of a file; blank lines are left out.

    Raises:
      ValueError: A line is no JSON object with these strings. The message names the line.
      OSError: The file cannot be read.
    """
    for offset, line in _documents(Span(path, 0, math.inf), BEGINS["line"]):
        if (text := _decode(path, offset, line)).strip():
            yield tuple(_value(path, offset, text, key) for key in keys)


def _place(path: str, offset: int) -> str:
    numbers = (number for number, (start, _) in enumerate(_lines(path, 0), 1) if start == offset)
    return f"{path}, line {next(numbers)}"
