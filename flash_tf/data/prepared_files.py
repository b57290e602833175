"""Writes prepared windows: each unit of a source by itself, then the rests of all units together, then the manifest.

Every file appears whole or not at all, and has the same content whoever writes it. So work that was killed goes on with
what is missing, and two workers may do the same unit.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from flash_tf.data import stored
from flash_tf.data.packing import Batch
from flash_tf.data.prepared import FORMAT, MANIFEST, Layout, file_name, read_manifest
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


def write_unit(
    folder: str,
    layout: Layout,
    number: int,
    name: str,
    shard: TokenizedShard,
    tokenizer: "Tokenizer",
    pad_last: bool,
) -> None:
    """Cuts the tokens of a unit into windows, and writes its files, its rest and its marker.

    Args:
      folder: The folder of the split, local or gs://.
      layout: How a window is stored.
      number: The unit's number.
      name: Its name in the source.
      shard: Its tokens.
      tokenizer: Their tokenizer.
      pad_last: See `Packing.cut`.

    Raises:
      OSError: A file cannot be written.
    """
    windows = layout.packing.cut(shard, tokenizer, pad_last=pad_last)
    files, rest = divmod(len(windows), layout.windows_per_file)
    for part, start in enumerate(range(0, len(windows), layout.windows_per_file)):
        numbers = np.arange(start, min(start + layout.windows_per_file, len(windows)))
        path = file_name(number, part) if part < files else _rest(number)
        stored.write(f"{folder}/{path}", _records(windows.read(numbers), layout))
    unit = Unit(
        name=name,
        files=files,
        rest=rest,
        documents=len(shard.offsets) - 1,
        tokens=windows.text_tokens(len(windows)) if len(windows) else 0,
        bytes=shard.bytes,
        words=shard.words,
    )
    stored.write(f"{folder}/{_marker(number)}", json.dumps(asdict(unit)).encode())


def join_rests(folder: str, layout: Layout, units: int, number: int, pieces: Iterable[Piece]) -> None:
    """Writes a file of the unit after the last, of `units` units, from pieces of rests."""
    data = []
    for unit, start, end in pieces:
        if (found := stored.read(path := f"{folder}/{_rest(unit)}")) is None:
            raise OSError(f"{path} is missing: run the same `flash-tf prepare` again")
        data.append(np.frombuffer(found, layout.record)[start:end])
    stored.write(f"{folder}/{file_name(units, number)}", np.concatenate(data))


class PreparedFiles:
    """The files of one split while workers write them.

    Args:
      folder: The folder of the split, local or gs://.
      layout: How a window is stored.
      units: The names of the source's units, in order.
    """

    def __init__(self, folder: str, layout: Layout, units: list[str]):
        self.folder, self.layout, self.units = folder, layout, units

    def written(self) -> dict[int, Unit]:
        """The units whose files are all there, by number. A rest is not missed once it is joined to others."""
        units, there = self.marked(), stored.names(self.folder)
        joined = len(units) == len(self.units) and there >= {
            file_name(len(self.units), i) for i in range(self._joined_files(units))
        }
        return {
            number: unit
            for number, unit in units.items()
            if there >= {file_name(number, part) for part in range(unit.files)}
            and (joined or not unit.rest or _rest(number) in there)
        }

    def marked(self, without: Collection[int] = ()) -> dict[int, Unit]:
        """The units that have a marker, by number, without some of them."""
        there = stored.names(self.folder)
        numbers = [i for i in range(len(self.units)) if i not in without and _marker(i) in there]
        return {number: unit for number in numbers if (unit := self._read(number)) is not None}

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
        there = stored.names(self.folder)
        return {i: task for i, task in enumerate(self.joins(units)) if file_name(len(self.units), i) not in there}

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
        for name in stored.names(self.folder):
            if name.endswith(".rest"):
                stored.remove(f"{self.folder}/{name}")

    def _joined_files(self, units):
        return -(-sum(unit.rest for unit in units.values()) // self.layout.windows_per_file)

    def _read(self, number: int) -> Unit | None:
        """The marker of a unit; None if it is missing, damaged or another unit's."""
        try:
            unit = Unit(**json.loads(stored.read(f"{self.folder}/{_marker(number)}") or b""))
        except (ValueError, TypeError):
            return None
        return unit if unit.name == self.units[number] else None


def _records(batch: Batch, layout: Layout) -> np.ndarray:
    records = np.empty(len(batch["tokens"]), layout.record)
    for name in layout.fields:
        records[name] = batch[name]
    return records


def begin(directory: str, about: dict) -> None:
    """Marks a folder as the place of these windows, unless it holds other windows or other files.

    Args:
      directory: The folder, local or gs://.
      about: What decides the windows, as far as it is known: entries of the manifest.

    Raises:
      ValueError: It holds something else. Nothing was changed.
    """
    there = read_manifest(directory)
    if there is None and (others := {name for name in stored.names(directory) if not stored.is_partial(name)}):
        raise ValueError(f"{directory} holds {min(others)}, which flash-tf prepare did not write: give another folder")
    there = there or {}
    for name in about:
        if name in there and there[name] != about[name]:
            raise ValueError(
                f"{directory} holds windows with another {name}: {_short(there[name])}, and this config has "
                f"{_short(about[name])}; give another folder"
            )
    if not about.keys() <= there.keys():
        _store(directory, {**there, **about}, None)


def finish(directory: str, about: dict, splits: Mapping[str, dict]) -> None:
    """Writes the whole manifest."""
    _store(directory, about, splits)


def _store(directory, about, splits):
    text = json.dumps({**about, "format": FORMAT, "splits": splits}, indent=1)
    stored.write(f"{directory}/{MANIFEST}", (text + "\n").encode())


def _marker(number: int) -> str:
    return f"{number:07d}.json"


def _rest(number: int) -> str:
    return f"{number:07d}.rest"


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
