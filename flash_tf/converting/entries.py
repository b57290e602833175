"""How variables of ours are made of public tensors, and the other way round. Both ways are exact."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

ROW = "#"


class Entry(NamedTuple):
    """One variable, and the public tensors that it is made of.

    Attributes:
      ours: The variable's path below the model's name.
      theirs: Names of public tensors, which we join along our last axis. `name#2` is row 2 of a tensor. Without one,
        the variable must be zero.
      turned: Whether the public matrices are `[out, in]`, as in `torch.nn.Linear`.
      parts: Their widths along our last axis; None for equal ones.
      shape: The public shape, if it is neither ours nor its transpose.
      order: For each of our channels the public one, among the joined; None for the same order.
    """

    ours: str
    theirs: tuple[str, ...]
    turned: bool = False
    parts: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None


def linear(ours: str, *theirs: str, parts: tuple[int, ...] | None = None, use_bias: bool = False) -> Iterator[Entry]:
    """Entries of a Dense layer that is made of `torch.nn.Linear` layers side by side."""
    yield Entry(f"{ours}/kernel", tuple(f"{name}.weight" for name in theirs), turned=True, parts=parts)
    if use_bias:
        yield Entry(f"{ours}/bias", tuple(f"{name}.bias" for name in theirs), parts=parts)


def to_public(entries: Iterable[Entry], value_of: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """The public tensors of variables, which `value_of` gives by their paths.

    Raises:
      ValueError: A variable has no public tensor, and is not zero.
    """
    found, rows = {}, defaultdict(list)
    for entry in entries:
        for name, value in _parts(entry, value_of(entry.ours)):
            tensor, mark, _ = name.partition(ROW)
            if mark:
                rows[tensor].append(value)  # they come in their order
            else:
                found[name] = value
    return found | {name: np.stack(values) for name, values in rows.items()}


def _parts(entry, value):
    if not entry.theirs:
        if np.any(value):
            raise ValueError(f"{entry.ours} needs zeros, because the public architecture has no such weight")
        return
    value = np.atleast_1d(value)
    value = value if entry.order is None else value[..., np.argsort(entry.order)]
    ends = np.cumsum(entry.parts or [value.shape[-1] // len(entry.theirs)] * len(entry.theirs))[:-1]
    for name, part in zip(entry.theirs, np.split(value, ends, axis=-1), strict=True):
        part = part.T if entry.turned else part
        yield name, np.ascontiguousarray(part if entry.shape is None else part.reshape(entry.shape))


def to_ours(entry: Entry, shape: tuple[int, ...], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """A variable of some shape, from the public tensors that `read` finds by name."""
    found = [_row(name, read) for name in entry.theirs]
    if not found:
        return np.zeros(shape, "float32")
    if entry.shape is not None:
        found = [x.reshape(shape[::-1] if entry.turned else shape) for x in found]
    joined = found[0] if len(found) == 1 else np.concatenate(found, axis=0 if entry.turned else -1)
    joined = joined.T if entry.turned else joined
    return joined if entry.order is None else joined[..., list(entry.order)]


def _row(name, read):
    tensor, mark, row = name.partition(ROW)
    return read(tensor)[int(row)] if mark else read(tensor)
