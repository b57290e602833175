"""The tokens of a split on disk. Each shard is tokenized once, at its first use, and memory-mapped after that."""

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flash_tf.data.sources import Source

if TYPE_CHECKING:  # the tokenizer brings TensorFlow Text, which reading tokens does not need
    from flash_tf.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 22  # 4 MB of text and its tokens are in memory at a time, for a shard of any size


class StoppedError(Exception):
    """Tokenizing was asked to stop. What it was writing is gone."""


@dataclass(frozen=True, kw_only=True)
class TokenizedShard:
    """The documents of one shard as tokens.

    Attributes:
      tokens: uint16 `[t]` (int32 for vocabularies above 65,536), memory-mapped: the documents one after the other,
        each followed by eos. Documents without tokens are left out.
      offsets: int64 `[documents + 1]`, memory-mapped. Document i with its eos is
        `tokens[offsets[i] : offsets[i + 1]]`.
      words: Whitespace-separated words of the original text.
      bytes: UTF-8 bytes of the original text.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    words: int
    bytes: int


class TokenCache:
    """The tokenized shards of one split of one source.

    A shard is two array files and a marker with their sizes. All are written under temporary names and renamed, the
    marker last. So a process that is killed at any moment leaves a whole shard or none. Threads and processes may share
    a cache: a file lock for each shard makes the second one wait and find the shard done.

    Args:
      directory: The folder of all caches. This cache gets a folder in it, named by the split and a hash of the
        tokenizer, the source and the split. Its `about.json` describes them.
      source: The source of the documents.
      tokenizer: Gives the documents' tokens.
      split: "train" or "validation".
      on_progress: Called as `on_progress(done, total, unit)` after each shard that had to be tokenized, on the thread
        that tokenized it: `done` of the split's `total` shards are now on disk; `unit` is "train shards" or
        "validation shards".

    Raises:
      ValueError: The source has no such split.
    """

    def __init__(
        self,
        directory: str,
        source: Source,
        tokenizer: "Tokenizer",
        split: str,
        on_progress: Callable[[int, int, str], None] | None = None,
    ):
        self.tokenizer = tokenizer
        self.split = split
        self.shards = source.shards(split)
        self._source = source
        self._on_progress = on_progress
        self._stopped = threading.Event()
        about = {"split": split, "source": source.identity(), "tokenizer": tokenizer.fingerprint, **self._more()}
        about["shards"] = hashlib.sha256("\0".join(self.shards).encode()).hexdigest()[:16]  # it may cut others
        self._about = json.dumps(about, indent=2, sort_keys=True)
        self.directory = Path(directory) / f"{split}-{hashlib.sha256(self._about.encode()).hexdigest()[:16]}"
        self._dtype = np.dtype(np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.int32)

    def get(self, index: int) -> TokenizedShard:
        """The shard `shards[index]`. Tokenizes it first if it is not whole on disk.

        Raises:
          OSError: The shard cannot be written, for example on a full disk. Nothing half-written stays.
        """
        if (shard := self._read(index)) is not None:
            return shard
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self._path(index, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (shard := self._read(index)) is not None:
                return shard
            self._tokenize(index)
            shard = self._read(index)
        if self._on_progress is not None:
            self._on_progress(len(list(self.directory.glob("[0-9]*.json"))), len(self.shards), f"{self.split} shards")
        return shard

    def stop(self) -> None:
        """Makes `get` raise a StoppedError where it tokenizes, in any thread, within some seconds."""
        self._stopped.set()

    def _more(self) -> dict:
        """What else decides the content of a shard."""
        return {}

    def _path(self, index: int, suffix: str) -> Path:
        return self.directory / f"{index:05d}.{suffix}"

    def _read(self, index: int) -> TokenizedShard | None:
        """The shard on disk; None if it is missing, cut short or damaged."""
        try:
            marker = json.loads(self._path(index, "json").read_text())
            name, size, documents = marker["shard"], marker["tokens"], marker["documents"]
            tokens = mapped(self._path(index, "tokens"), self._dtype, size)
            offsets = mapped(self._path(index, "offsets"), np.dtype(np.int64), documents + 1)
            if name != self.shards[index] or offsets[-1] != size:
                return None
            return TokenizedShard(tokens=tokens, offsets=offsets, words=marker["words"], bytes=marker["bytes"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _tokenize(self, index: int) -> None:
        """Tokenizes the shard and writes its files."""
        (self.directory / "about.json").write_text(self._about + "\n")
        self._path(index, "json").unlink(missing_ok=True)  # from here on the old files do not count
        lengths, words, size = [0], 0, 0
        with (  # renamed in the reverse order: the marker last
            renamed_when_done(self._path(index, "json")) as marker_file,
            renamed_when_done(self._path(index, "tokens")) as tokens_file,
            renamed_when_done(self._path(index, "offsets")) as offsets_file,
        ):
            for texts in text_batches(self._source.documents(self.split, self.shards[index])):
                if self._stopped.is_set():
                    raise StoppedError
                documents = [ids for ids in self.tokenizer.encode(texts) if len(ids)]
                lengths += [len(ids) + 1 for ids in documents]
                words += sum(len(text.split()) for text in texts)
                size += sum(len(text.encode()) for text in texts)
                stored = (np.append(ids, self.tokenizer.eos_id).astype(self._dtype) for ids in documents)
                write_whole(tokens_file, b"".join(ids.tobytes() for ids in stored))
            offsets = np.cumsum(lengths, dtype=np.int64)
            write_whole(offsets_file, offsets.tobytes())
            marker = {
                "shard": self.shards[index],
                "documents": len(offsets) - 1,
                "tokens": int(offsets[-1]),
                "words": words,
                "bytes": size,
            }
            write_whole(marker_file, json.dumps(marker).encode())


def text_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents with about `BATCH_CHARACTERS` in each."""
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def mapped(path: Path, dtype: np.dtype, size: int) -> np.ndarray:
    """The array in a file, which must hold exactly `size` elements."""
    if path.stat().st_size != size * dtype.itemsize:
        raise ValueError(f"{path} needs {size * dtype.itemsize} bytes, got {path.stat().st_size}")
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)  # an empty file cannot be mapped


@contextmanager
def renamed_when_done(path: Path) -> Iterator[FileIO]:
    """A file to write. It appears as `path` only when all is written, and never after an error."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]  # a full disk takes some of the data first, and refuses the next write
    except OSError as error:
        raise OSError(error.errno, f"cannot write the tokens of a shard: {error.strerror}", file.name) from error
