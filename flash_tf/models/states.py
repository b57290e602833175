"""Checks of decoding states: layout and room for the next tokens."""

from collections.abc import Callable

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
        for name in sorted(self._short.keys() | state.keys()):
            need, got = self._short.get(name), tuple(state[name].shape) if name in state else None
            if need is None or got is None or not self._alike(name, got):
                raise ValueError(f"{who} needs a state of its own, with {_said(name, need)}, got {_said(name, got)}")
        come = tokens if valid is None else _number(valid)
        if come is not None and come > tokens:
            raise ValueError(f"{who} got {tokens} tokens a row: valid needs at most that many, got {come}")
        room = self._capacity(state)
        most = min((limit for limit in (room, longest) if limit is not None), default=None)
        if most is None or (had := _number(state["position"])) is None:
            return
        if come is not None and had + come > most:
            what = "has a state with room for" if most == room else "reads at most"
            raise ValueError(f"{who} {what} {most} tokens a row, got rows of {had} and {come} more")

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


def _number(x):
    """The largest of some integers; None while a function is traced."""
    largest = ops.max(x)
    try:
        return int(largest)
    except TypeError:
        return None
