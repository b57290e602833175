"""Checks of what a stream goes on from: the layout of a state, its room, and the number of tokens that come."""

from collections.abc import Callable, Iterable

import keras
from keras import ops

from kernels_xla.common.spec import Tensor

SHORT, LONG = 1024, 2048  # capacities of two states; comparing them shows which axes grow


class Layout:
    """The layout of a model's states, for any batch and capacity.

    Args:
      make: A function from a capacity in tokens to the state of one row.
    """

    def __init__(self, make: Callable[[int], dict]):
        self._short, self._long = ({name: tuple(x.shape) for name, x in make(n).items()} for n in (SHORT, LONG))

    def check(
        self, who: str, state: dict, tokens: int, valid: Tensor | None = None, longest: int | None = None
    ) -> None:
        """Raises a ValueError unless `state` has this layout and room for `tokens` more of each row, or `valid` [b].

        A row has at most `longest` tokens in all, whatever the room.

        Room can be checked outside compiled functions only. Inside one, tokens beyond the capacity are dropped, and the
        caller must prevent that.
        """
        self.check_entries(who, state, self._short.keys() | state.keys())
        come = tokens if valid is None else _number(ops.max(valid))
        room = self._capacity(state)
        most = min((limit for limit in (room, longest) if limit is not None), default=None)
        if most is None or (had := _number(ops.max(state["position"]))) is None:
            return
        if come is not None and had + come > most:
            what = "has a state with room for" if most == room else "reads at most"
            raise ValueError(f"{who} {what} {most} tokens a row, got rows of {had} and {come} more")

    def check_entries(self, who: str, state: dict, names: Iterable[str]) -> None:
        """Raises a ValueError unless the entries `names` of a state have this layout."""
        for name in sorted(names):
            need, got = self._short.get(name), tuple(state[name].shape) if name in state else None
            if need is None or got is None or not self._alike(name, got):
                raise ValueError(f"{who} needs a state of its own, with {_said(name, need)}, got {_said(name, got)}")

    def _alike(self, name, got):
        short, long = self._short[name], self._long[name]
        free = [True, *(a != b for a, b in zip(short[1:], long[1:], strict=True))]
        return len(got) == len(short) and all(f or a == b for f, a, b in zip(free, short, got, strict=True))

    def _capacity(self, state):
        """The number of tokens that every cache of a state has room for; None if nothing grows."""
        found = []
        for name, short in self._short.items():
            for axis, (a, b) in enumerate(zip(short, self._long[name], strict=True)):
                if a != b:
                    each = (LONG - SHORT) // (b - a)  # tokens of a slot; the last slot may be open
                    found.append(SHORT + (state[name].shape[axis] - a) * each + each - 1)
        return min(found, default=None)


def _said(name, shape):
    return f"no {name}" if shape is None else f"{name} [b, {', '.join(map(str, shape[1:]))}]".replace(", ]", "]")


def counts(who: str, valid: Tensor | None, rows: int | None, tokens: int | None) -> Tensor | None:
    """How many of the next tokens of each row are real, as int32 `[rows]`; None if `valid` is.

    Raises:
      ValueError: `valid` is no row of `rows` integers. Outside a compiled function, also if one is below 0 or above
        `tokens`.
    """
    if valid is None:
        return None
    valid = ops.convert_to_tensor(valid)
    shape, dtype = tuple(valid.shape), keras.backend.standardize_dtype(valid.dtype)
    if "int" not in dtype or len(shape) != 1 or (None not in (rows, *shape) and shape[0] != rows):
        raise ValueError(f"{who} needs valid as integers, one for each of {rows} rows, got {dtype} {list(shape)}")
    least, most = (_number(of(valid)) if shape[0] else None for of in (ops.min, ops.max))
    if None not in (least, most, tokens) and not 0 <= least <= most <= tokens:
        raise ValueError(f"{who} got {tokens} tokens a row: valid needs 0 to {tokens}, got {least} to {most}")
    return ops.cast(valid, "int32")


def _number(x):
    """A scalar integer as Python's; None while a function is traced."""
    try:
        return int(x)
    except TypeError:
        return None
