"""How variables of ours are made of public tensors, and the other way round. Both ways are exact."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Entry(NamedTuple):
    """One variable, and the public tensors that it is made of.

    Attributes:
      ours: The variable's path below the model's name.
      theirs: Names of public tensors, which we join along our last axis. Without one, the variable must be zero.
      turned: Whether the public matrices are `[out, in]`, as in `torch.nn.Linear`.
      parts: Their widths along our last axis; None for equal ones.
      shape: The public shape, if it is neither ours nor its transpose.
    """

    ours: str
    theirs: tuple[str, ...]
    turned: bool = False
    parts: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None


def linear(ours: str, *theirs: str, parts: tuple[int, ...] | None = None, use_bias: bool = False) -> Iterator[Entry]:
    """Entries of a Dense layer that is made of `torch.nn.Linear` layers side by side."""
    yield Entry(f"{ours}/kernel", tuple(f"{name}.weight" for name in theirs), turned=True, parts=parts)
    if use_bias:
        yield Entry(f"{ours}/bias", tuple(f"{name}.bias" for name in theirs), parts=parts)


def to_public(entry: Entry, value: np.ndarray) -> dict[str, np.ndarray]:
    """The public tensors of a variable.

    Raises:
      ValueError: The variable has no public tensor, and is not zero.
    """
    if not entry.theirs:
        if np.any(value):
            raise ValueError(f"{entry.ours} needs zeros, because the public architecture has no such weight")
        return {}
    ends = np.cumsum(entry.parts or [value.shape[-1] // len(entry.theirs)] * len(entry.theirs))[:-1]
    found = [part.T if entry.turned else part for part in np.split(value, ends, axis=-1)]
    shaped = [part if entry.shape is None else part.reshape(entry.shape) for part in found]
    return dict(zip(entry.theirs, map(np.ascontiguousarray, shaped), strict=True))


def public_shapes(entry: Entry, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of the public tensors of a variable."""
    return {name: x.shape for name, x in to_public(entry, np.broadcast_to(np.zeros((), "int8"), shape)).items()}


def to_ours(entry: Entry, shape: tuple[int, ...], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """A variable of some shape, from the public tensors that `read` finds by name."""
    found = [read(name) for name in entry.theirs]
    if not found:
        return np.zeros(shape, "float32")
    if entry.shape is not None:
        found = [x.reshape(shape[::-1] if entry.turned else shape) for x in found]
    return np.concatenate([x.T if entry.turned else x for x in found], axis=-1)
