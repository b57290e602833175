"""Labelled examples as rows: some arrays for each example, stored as they are and read at one length."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flash_tf.data import pixels
from flash_tf.data.packing import Batch, Field
from flash_tf.data.sources import ExampleSource
from flash_tf.data.token_cache import StoppedError, TokenCache, mapped, renamed_when_done, write_whole

if TYPE_CHECKING:
    from flash_tf.data.tokenizer import Tokenizer

EXAMPLES_AT_A_TIME = 4096  # so many examples and their rows are in memory at a time, for a shard of any size
Placed = tuple[str, dict[str, Any]]  # an example, after its place for error messages
Row = dict[str, Any]  # a field's name -> its values, no more than the field's length


class RowEncoder(Protocol):
    """Makes the rows of a task. An example may give one row, or several.

    Attributes:
      fields: The arrays of a row, `tokens` and `labels` among them.
    """

    fields: dict[str, Field]

    def identity(self) -> dict:
        """What decides the rows, beside the source and the tokenizer."""

    def texts(self, placed: Placed) -> list[str]:
        """The texts of an example, for training a tokenizer."""

    def check(self, placed: Placed) -> None:
        """Raises a ValueError if a part of an example is missing or cannot be used; it needs no tokenizer."""

    def rows(self, examples: list[Placed], labelled: bool = True) -> Iterator[Row]:
        """The rows of some examples, in order; without labels if they are not needed.

        Raises:
          ValueError: A key of an example is missing or cannot be used. The message begins with the example's place.
        """

    def trains(self, row: Row) -> bool:
        """Whether training reads a row: one that has a label."""
        field = self.fields["labels"]
        return bool(np.any(np.asarray(row["labels"], field.dtype) != field.padding))


def placed(source: ExampleSource, split: str, shard: str) -> Iterator[Placed]:
    """The examples of a shard with their places, which count from 1."""
    for number, example in enumerate(source.examples(split, shard), 1):
        yield f"{shard}, example {number}", example


@dataclass(frozen=True, kw_only=True)
class RowShard:
    """The rows of one shard.

    Attributes:
      values: For each field, the values of all rows one after the other, memory-mapped.
      offsets: For each field int64 `[rows + 1]`: row i has `values[offsets[i] : offsets[i + 1]]`.
      left_out: Rows that training does not read.
      words: None of the text's words are counted.
    """

    values: dict[str, np.ndarray]
    offsets: dict[str, np.ndarray]
    left_out: int
    words: int = 0


class RowCache(TokenCache):
    """The rows of one split of one source, on disk; see `TokenCache`. Each field is a file.

    The training split has the rows alone that the encoder `trains`.

    Args:
      directory: The folder of all caches.
      source: The source of the examples.
      tokenizer: The encoder's.
      split: "train" or "validation".
      encoder: Makes the rows.
      on_progress: As for `TokenCache`.
    """

    def __init__(
        self,
        directory: str,
        source: ExampleSource,
        tokenizer: "Tokenizer",
        split: str,
        encoder: RowEncoder,
        on_progress: Callable[[int, int, str], None] | None = None,
    ):
        self._encoder = encoder
        super().__init__(directory, source, tokenizer, split, on_progress)

    def _more(self) -> dict:
        checksums = getattr(self._source, "checksums", None)
        contents = {} if checksums is None else {"contents": checksums(self.split)}
        return {"rows": self._encoder.identity(), "grey": pixels.GREY, **contents}

    def _read(self, index: int) -> RowShard | None:
        try:
            marker = json.loads(self._path(index, "json").read_text())
            if marker["shard"] != self.shards[index]:
                return None
            sizes, rows = marker["sizes"], marker["rows"]
            values, offsets = {}, {}
            for name, field in self._encoder.fields.items():
                values[name] = mapped(self._path(index, name), np.dtype(field.dtype), sizes[name])
                offsets[name] = mapped(self._path(index, f"{name}.offsets"), np.dtype(np.int64), rows + 1)
            return RowShard(values=values, offsets=offsets, left_out=marker["left_out"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _tokenize(self, index: int) -> None:
        (self.directory / "about.json").write_text(self._about + "\n")
        self._path(index, "json").unlink(missing_ok=True)  # from here on the old files do not count
        fields, left_out = self._encoder.fields, 0
        with contextlib.ExitStack() as files:  # renamed in the reverse order: the marker last
            opened = lambda suffix: files.enter_context(renamed_when_done(self._path(index, suffix)))  # noqa: E731
            marker, values = opened("json"), {name: opened(name) for name in fields}
            lengths = {name: [np.zeros(1, np.int64)] for name in fields}
            for encoded in self._encoded(self.shards[index]):
                rows = [row for row in encoded if self.split != "train" or self._encoder.trains(row)]
                left_out += len(encoded) - len(rows)
                for name, field in fields.items():
                    arrays = [np.asarray(row[name], field.dtype) for row in rows]
                    write_whole(values[name], b"".join(array.tobytes() for array in arrays))
                    lengths[name].append(np.array([len(array) for array in arrays], np.int64))
            offsets = {name: np.cumsum(np.concatenate(found)) for name, found in lengths.items()}
            for name in fields:
                write_whole(opened(f"{name}.offsets"), offsets[name].tobytes())
            about = {
                "rows": len(offsets["tokens"]) - 1,
                "left_out": left_out,
                "sizes": {name: int(ends[-1]) for name, ends in offsets.items()},
            }
            write_whole(marker, json.dumps({"shard": self.shards[index], **about}).encode())

    def _encoded(self, shard: str) -> Iterator[list[Row]]:
        for batch in batches(placed(self._source, self.split, shard)):
            if self._stopped.is_set():
                raise StoppedError
            if rows := list(self._encoder.rows(batch)):
                yield rows


def batches(examples: Iterable[Placed]) -> Iterator[list[Placed]]:
    """Lists of examples, no longer than `EXAMPLES_AT_A_TIME`."""
    examples = iter(examples)
    while batch := list(itertools.islice(examples, EXAMPLES_AT_A_TIME)):
        yield batch


class Rows:
    """The rows of a shard, padded when they are read."""

    def __init__(self, shard: RowShard, fields: dict[str, Field]):
        self._shard, self._fields = shard, fields

    def __len__(self) -> int:
        return len(self._shard.offsets["tokens"]) - 1

    def read(self, indices: np.ndarray) -> Batch:
        """Each field of the rows `indices`, `[k, length]`."""
        values, offsets = self._shard.values, self._shard.offsets
        return {
            name: padded([values[name][offsets[name][i] : offsets[name][i + 1]] for i in indices], field)
            for name, field in self._fields.items()
        }

    def text_tokens(self, count: int) -> int:
        """Tokens in the first `count` rows."""
        return int(self._shard.offsets["tokens"][count])


def padded(arrays: list, field: Field) -> np.ndarray:
    """Arrays of a field's length or less as one, `[k, length]`."""
    out = np.full((len(arrays), field.length), field.padding, field.dtype)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return out


@dataclass(frozen=True)
class RowPacking:
    """A window is a row; see `Packing`.

    Attributes:
      arrays: The fields of a row.
    """

    arrays: dict[str, Field]

    def cut(self, shard: RowShard, tokenizer: "Tokenizer", *, pad_last: bool) -> Rows:
        """The rows of a shard."""
        del tokenizer, pad_last
        return Rows(shard, self.arrays)

    def fields(self, tokenizer: "Tokenizer") -> dict[str, Field]:
        """The arrays of a row."""
        del tokenizer
        return self.arrays

    def nothing(self, cache: TokenCache, pad_last: bool) -> ValueError:
        """The error of a split without an example."""
        del pad_last
        return ValueError(f"the {cache.split} split has no example")
