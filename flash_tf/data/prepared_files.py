"""Writes prepared windows: each unit of a source by itself, then the rests of all units together, then the manifest.

Every file appears whole or not at all, and has the same content whoever writes it. So work that was killed goes on with
what is missing, and two workers may do the same unit.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from flash_tf.data import stored
from flash_tf.data.packing import Batch, Windows
from flash_tf.data.prepared import FORMAT, MANIFEST, Layout, file_name, read_manifest, windows_in
from flash_tf.data.token_cache import TokenizedShard

if TYPE_CHECKING:
    from flash_tf.data.tokenizer import Tokenizer

Piece = tuple[int, int, int]  # a unit, and the first and the end of some windows of its rest


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit that is written: the content of its marker.

    Attributes:
      name: Its name in the source.
      files: Full files.
      rest: Windows beyond them.
      documents, tokens, bytes: Counts of its text.
      words: Words of the original text; None if they were not counted.
    """

    name: str
    files: int
    rest: int
    documents: int
    tokens: int
    bytes: int
    words: int | None


class PreparedFiles:
    """The files of one split while they are written.

    Args:
      directory: The folder of the split, local or gs://.
      layout: How a window is stored.
      units: The names of the source's units, in order.
    """

    def __init__(self, directory: str, layout: Layout, units: list[str]):
        self.directory, self.layout, self.units = directory, layout, units

    def write(self, number: int, shard: TokenizedShard, tokenizer: "Tokenizer", pad_last: bool) -> Unit:
        """Cuts the tokens of a unit into windows, and writes its files, its rest and its marker.

        Args:
          number: The unit's number.
          shard: Its tokens.
          tokenizer: Their tokenizer.
          pad_last: See `Packing.cut`.

        Raises:
          OSError: A file cannot be written.
        """
        windows = self.layout.packing.cut(shard, tokenizer, pad_last=pad_last)
        files, rest = divmod(len(windows), self.layout.windows_per_file)
        for part, indices in enumerate(windows_in(np.arange(len(windows)), self.layout.windows_per_file)):
            name = file_name(number, part) if part < files else _rest(number)
            stored.write(f"{self.directory}/{name}", self._records(windows.read(indices)))
        unit = Unit(
            name=self.units[number],
            files=files,
            rest=rest,
            documents=len(shard.offsets) - 1,
            tokens=_tokens(windows),
            bytes=shard.bytes,
            words=shard.words,
        )
        stored.write(f"{self.directory}/{_marker(number)}", json.dumps(asdict(unit)).encode())
        return unit

    def written(self) -> dict[int, Unit]:
        """The units whose files are all there, by number. A rest is not missed once it is joined to others."""
        there = stored.names(self.directory)
        numbers = [number for number in range(len(self.units)) if _marker(number) in there]
        units = {number: unit for number in numbers if (unit := self._read(number)) is not None}
        joined = len(units) == len(self.units) and there >= {
            file_name(len(self.units), i) for i in range(self._joined_files(units))
        }
        return {
            number: unit
            for number, unit in units.items()
            if there >= {file_name(number, part) for part in range(unit.files)}
            and (joined or not unit.rest or _rest(number) in there)
        }

    def joins(self, units: Mapping[int, Unit]) -> list[list[Piece]]:
        """The pieces of rests that make each file of the last unit. All units must be written."""
        size, ends = self.layout.windows_per_file, np.cumsum([0, *(units[i].rest for i in range(len(self.units)))])
        tasks = []
        for first in range(0, int(ends[-1]), size):
            last = min(first + size, int(ends[-1]))
            numbers = range(np.searchsorted(ends, first, "right") - 1, np.searchsorted(ends, last, "left"))
            spans = (
                (i, max(first, int(ends[i])) - int(ends[i]), min(last, int(ends[i + 1])) - int(ends[i]))
                for i in numbers
            )
            tasks.append([span for span in spans if span[1] < span[2]])
        return tasks

    def missing_joins(self, units: Mapping[int, Unit]) -> dict[int, list[Piece]]:
        """The entries of `joins`, by number, whose file is not there."""
        there = stored.names(self.directory)
        return {i: task for i, task in enumerate(self.joins(units)) if file_name(len(self.units), i) not in there}

    def join(self, number: int, pieces: list[Piece]) -> None:
        """Writes a file of the last unit from pieces of rests."""
        data = []
        for unit, start, end in pieces:
            found = stored.read(f"{self.directory}/{_rest(unit)}")
            data.append(np.frombuffer(found, self.layout.record)[start:end])
        stored.write(f"{self.directory}/{file_name(len(self.units), number)}", np.concatenate(data))

    def about(self, units: Mapping[int, Unit]) -> dict:
        """The split's entry in the manifest."""
        listed = [units[number] for number in range(len(self.units))]
        total = lambda name: sum(getattr(unit, name) for unit in listed)  # noqa: E731
        return {
            "windows": total("files") * self.layout.windows_per_file + total("rest"),
            **{name: total(name) for name in ("documents", "tokens", "bytes")},
            "words": None if any(unit.words is None for unit in listed) else total("words"),
            "files": [*(unit.files for unit in listed), self._joined_files(units)],
        }

    def remove_rests(self) -> None:
        """Removes what the joined files hold, once the manifest names them."""
        for name in stored.names(self.directory):
            if name.endswith(".rest"):
                stored.remove(f"{self.directory}/{name}")

    def _joined_files(self, units):
        return -(-sum(unit.rest for unit in units.values()) // self.layout.windows_per_file)

    def _read(self, number: int) -> Unit | None:
        """The marker of a unit; None if it is missing, damaged or another unit's."""
        try:
            unit = Unit(**json.loads(stored.read(f"{self.directory}/{_marker(number)}") or b""))
        except (ValueError, TypeError):
            return None
        return unit if unit.name == self.units[number] else None

    def _records(self, batch: Batch) -> np.ndarray:
        records = np.empty(len(batch["tokens"]), self.layout.record)
        for name in self.layout.fields:
            records[name] = batch[name]
        return records


def begin(directory: str, about: dict) -> None:
    """Marks a folder as the place of these windows, unless it holds other windows or other files.

    Args:
      directory: The folder, local or gs://.
      about: What decides the windows: the manifest without `format` and `splits`.

    Raises:
      ValueError: It holds something else. Nothing was changed.
    """
    there = read_manifest(directory)
    if there is None:
        if others := stored.names(directory):
            raise ValueError(
                f"{directory} holds {min(others)}, which flash-tf prepare did not write: give another folder"
            )
        _store(directory, about, None)
        return
    for name, value in about.items():
        if there.get(name) != value:
            raise ValueError(
                f"{directory} holds windows with another {name}: {_short(there.get(name))}, and this config has "
                f"{_short(value)}; give another folder"
            )


def finish(directory: str, about: dict, splits: Mapping[str, dict]) -> None:
    """Writes the whole manifest."""
    _store(directory, about, splits)


def _store(directory, about, splits):
    text = json.dumps({"format": FORMAT, **about, "splits": splits}, indent=1)
    stored.write(f"{directory}/{MANIFEST}", (text + "\n").encode())


def _tokens(windows: Windows) -> int:
    return windows.text_tokens(len(windows)) if len(windows) else 0


def _marker(number: int) -> str:
    return f"{number:07d}.json"


def _rest(number: int) -> str:
    return f"{number:07d}.rest"


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
