"""Windows that `flash-tf prepare` has written: the format, and its reader in NumPy. `docs/prepared.md` describes it."""

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flash_tf import owned_files
from flash_tf.data import stored
from flash_tf.data.packing import Batch, Field, Packing
from flash_tf.data.shuffling import key_of, shuffled

MANIFEST, FORMAT = "prepared.json", 1
FILE_BYTES = 2**22  # about so many in each file


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a window is stored, and the rule that made it.

    Attributes:
      packing: The rule.
      fields: The arrays of a window, in the order in which a file has them. Their types are little-endian.
      windows_per_file: R, windows in every file but the last one of a split.
    """

    packing: Packing
    fields: dict[str, Field]
    windows_per_file: int

    @staticmethod
    def of(packing: Packing, tokenizer: Any, windows_per_file: int | None = None) -> "Layout":
        """The layout of a packing's windows, in the smallest types that hold them."""
        small = {
            "tokens": np.uint16 if tokenizer.vocabulary_size <= 2**16 else np.int32,
            "segment_ids": np.uint16 if packing.sequence_length + packing.overlap < 2**16 else np.int32,
        }
        fields = {
            name: Field(field.length, field.padding, small[name]) for name, field in packing.fields(tokenizer).items()
        }
        size = _record(fields).itemsize
        return Layout(
            packing=packing,
            fields=fields,
            windows_per_file=windows_per_file or max(1, 2 ** round(np.log2(max(1, FILE_BYTES / size)))),
        )

    @property
    def record(self) -> np.dtype:
        """A window as a NumPy record."""
        return _record(self.fields)

    def as_mapping(self) -> dict:
        """The layout in the manifest."""
        return {
            "packing": asdict(self.packing),
            "fields": {
                name: {"length": field.length, "padding": int(field.padding), "dtype": np.dtype(field.dtype).name}
                for name, field in self.fields.items()
            },
            "windows_per_file": self.windows_per_file,
        }

    @staticmethod
    def from_mapping(values: dict) -> "Layout":
        fields = {
            name: Field(one["length"], one["padding"], np.dtype(one["dtype"]).type)
            for name, one in values["fields"].items()
        }
        return Layout(packing=Packing(**values["packing"]), fields=fields, windows_per_file=values["windows_per_file"])


def _record(fields):
    return np.dtype(
        [(name, np.dtype(field.dtype).newbyteorder("<"), (field.length,)) for name, field in fields.items()]
    )


def file_name(unit: int, number: int) -> str:
    """The name of a unit's file. The rests of all units together are the unit after the last."""
    return f"{unit:07d}-{number:05d}.windows"


class PreparedSplit:
    """The windows of one split, at any place without a look at those before.

    Args:
      directory: The folder of the split, local or gs://.
      layout: How a window is stored.
      about: The split's entry in the manifest.

    Attributes:
      windows: Their number.
      documents, tokens, bytes: Counts of the text. Tokens include eos, and no context.
      words: Whitespace-separated words of the original text; None if they were not counted.
      first_files: int64 `[units + 1]`, the number of each unit's first file.
    """

    def __init__(self, directory: str, layout: Layout, about: dict):
        self.directory, self.layout = directory, layout
        self.windows, self.documents = about["windows"], about["documents"]
        self.tokens, self.words, self.bytes = about["tokens"], about["words"], about["bytes"]
        self.first_files = np.concatenate([[0], np.cumsum(about["files"], dtype=np.int64)])[:-1]
        self.files = sum(about["files"])
        self._opened = functools.lru_cache(8)(self._open)

    @property
    def full(self) -> int:
        """The number of files with R windows. One with fewer may follow."""
        return self.windows // self.layout.windows_per_file

    def path(self, number: int) -> str:
        """The path of a file."""
        unit = int(np.searchsorted(self.first_files, number, side="right")) - 1
        return f"{self.directory}/{file_name(unit, number - int(self.first_files[unit]))}"

    def check(self) -> None:
        """Raises a ValueError if a file is missing. In a bucket, which takes long to list, reading finds it."""
        if not owned_files.is_local(self.directory):
            return
        there = stored.names(self.directory)
        if sum(name.endswith(".windows") for name in there) < self.files:
            gone = next(path for path in map(self.path, range(self.files)) if os.path.basename(path) not in there)
            raise ValueError(f"{gone} is missing, and {MANIFEST} names it: run the same `flash-tf prepare` again")

    def fault(self) -> OSError | None:
        """What is wrong with the first file that is missing or has another size; None if all are whole."""
        for number in range(self.files):
            try:
                self._open(number)
            except OSError as error:
                return error
        return None

    def read(self, numbers: np.ndarray) -> Batch:
        """Windows by their numbers in stored order: each field int32 `[k, length]`.

        Raises:
          OSError: A file is missing, or has another size than it was written with.
        """
        file, within = np.divmod(np.asarray(numbers, np.int64), self.layout.windows_per_file)
        out = np.empty(len(file), self.layout.record)
        for one in np.unique(file):
            out[file == one] = self._opened(int(one))[within[file == one]]
        return {name: out[name].astype(np.int32) for name in self.layout.fields}

    def batch(self, position: int, count: int, seed: int) -> Batch:
        """The windows `position` to `position + count - 1` of the endless order that a seed decides.

        Returns:
          What `read` gives, and `window` int32 `[count, 2]`, the epoch and the window's number in it.
        """
        epoch, number = np.divmod(np.arange(position, position + count), self.windows)
        window = np.stack([epoch, number], axis=-1).astype(np.int32)
        return {**self.read(self.order(epoch, number, seed)), "window": window}

    def order(self, epoch: np.ndarray, number: np.ndarray, seed: int) -> np.ndarray:
        """The windows, by their numbers in stored order, at some places of epochs, int64 `[k]`.

        Every epoch shuffles the files with R windows, and the windows of each file. A file with fewer is the last.
        """
        per_file = self.layout.windows_per_file
        place, within = np.divmod(number, per_file)
        out = np.empty(len(place), np.int64)
        for one in np.unique(epoch):
            for at in np.unique(place[epoch == one]):
                here = (epoch == one) & (place == at)
                full = at < self.full
                file = int(shuffled(at, self.full, key_of(seed, int(one)))) if full else self.full
                count = per_file if full else self.windows % per_file
                out[here] = file * per_file + shuffled(within[here], count, key_of(seed, int(one), file + 1))
        return out

    def _open(self, number: int) -> np.ndarray:
        """The windows of a file: memory-mapped on a disk, in memory from a bucket."""
        path, record = self.path(number), self.layout.record
        count = min(self.layout.windows_per_file, self.windows - number * self.layout.windows_per_file)
        try:
            local = owned_files.is_local(path)
            found = np.memmap(path, record, "r") if local else np.frombuffer(stored.read(path) or b"", record)
        except (FileNotFoundError, ValueError):
            found = ()
        if len(found) != count:
            raise OSError(f"{path} needs {count} windows of {record.itemsize} bytes, and is missing or cut short")
        return found


class PreparedWindows:
    """The training windows of a prepared split, as `WindowStream` gives them to NumPy.

    Args:
      split: The windows.
      seed: Seed of the order.
      limit: Number of windows that the run reads in all; only those are asked for.
    """

    def __init__(self, split: PreparedSplit, *, seed: int, limit: int):
        del limit
        self._split, self._seed = split, seed

    def batch(self, position: int, count: int) -> Batch:
        """The windows `position` to `position + count - 1`; see `PreparedSplit.batch`."""
        return self._split.batch(position, count, self._seed)

    def stop(self) -> None:
        """No wait is long here."""


class PreparedEvaluation:
    """A prepared split once through, in stored order; see `EvaluationBatches`.

    Args:
      split: The windows.
      batch_size: Windows in every batch. Windows of padding fill the last one.
      windows: Number of windows to read, from the beginning; None for all.

    Attributes:
      words: Words of the original text; None if they were not counted, or `windows` cuts the split short.
    """

    def __init__(self, split: PreparedSplit, *, batch_size: int, windows: int | None = None):
        self._split, self._batch_size = split, batch_size
        self._count = split.windows if windows is None else min(windows, split.windows)
        self.words = split.words if self._count == split.windows else None

    def __len__(self) -> int:
        return -(-self._count // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches like `PreparedSplit.batch`. The epoch is 0."""
        fills = {name: field.padding for name, field in self._split.layout.fields.items()}
        for start in range(0, self._count, self._batch_size):
            numbers = np.arange(start, min(start + self._batch_size, self._count))
            window = np.stack([np.zeros_like(numbers), numbers], axis=-1).astype(np.int32)
            missing = ((0, self._batch_size - len(numbers)), (0, 0))
            batch = {**self._split.read(numbers), "window": window}
            yield {name: np.pad(x, missing, constant_values=int(fills.get(name, 0))) for name, x in batch.items()}


class Prepared:
    """The manifest of a folder that `flash-tf prepare` wrote.

    Args:
      directory: The folder, local or gs://.

    Attributes:
      layout: How a window is stored.
      tokenizer: The fingerprint of the tokenizer, whose file is in the folder.
      source: The source's options in YAML.
      identity: SHA-256 of the source's identity.
      counts_words: Whether an evaluation also gives the perplexity per word.
      splits: "train" and "validation".

    Raises:
      ValueError: It holds no prepared windows, or not all of them.
    """

    def __init__(self, directory: str):
        self.directory = directory
        about = read_manifest(directory)
        if about is None:
            raise ValueError(f"{directory} has no {MANIFEST}, which `flash-tf prepare` writes")
        if about["splits"] is None:
            raise ValueError(f"{directory} is not prepared to its end: run the same `flash-tf prepare` again")
        self.layout = Layout.from_mapping(about)
        self.tokenizer, self.source, self.identity = about["tokenizer"], about["source"], about["identity"]
        self.counts_words = about["counts_words"]
        self.splits = {
            name: PreparedSplit(f"{directory}/{name}", self.layout, split) for name, split in about["splits"].items()
        }

    def check(self, packing: Packing, tokenizer: str) -> None:
        """Raises a ValueError unless a run cuts its text by this rule, and its tokenizer has this fingerprint."""
        wanted = asdict(packing)
        if tokenizer != self.tokenizer:
            raise ValueError(f"{self.directory} was prepared with another tokenizer than the run's")
        for name, value in asdict(self.layout.packing).items():
            if value != wanted[name] and (name != "align" or packing.kind == "documents"):
                raise ValueError(
                    f"{self.directory} was prepared with {name} {value}, and this config needs {wanted[name]}: "
                    "prepare the text with this config"
                )


def read_manifest(directory: str) -> dict[str, Any] | None:
    """The manifest of a folder, whole or begun; None if there is none.

    Raises:
      ValueError: It is damaged, or of another version.
    """
    if (data := stored.read(path := f"{directory}/{MANIFEST}")) is None:
        return None
    try:
        about = json.loads(data)
        version = about["format"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: it is not the manifest of prepared windows") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, and this version reads {FORMAT}")
    return about
