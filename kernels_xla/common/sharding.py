"""How the arrays of a traced program are divided among devices. No value depends on it but by rounding."""

import contextlib
from collections.abc import Callable, Iterator

from keras import ops

from kernels_xla.common.spec import Tensor

_divided: list[tuple[int, int]] = []
_gather: list[Callable[[Tensor], Tensor] | None] = []


@contextlib.contextmanager
def divided(rows: int = 1, tokens: int = 1, gather: Callable[[Tensor], Tensor] | None = None) -> Iterator[None]:
    """Traces the code inside for arrays `[b, n, ...]` in equal parts on rows x tokens devices.

    Args:
      rows: Parts of the rows.
      tokens: Parts of the tokens, in their order.
      gather: From a weight in parts to the whole weight on each device, with a gradient in parts. None if devices hold
        whole weights.
    """
    _divided.append((rows, tokens))
    _gather.append(gather)
    try:
        yield
    finally:
        _divided.pop()
        _gather.pop()


def gather_of_weights() -> Callable[[Tensor], Tensor] | None:
    """The function `gather` of `divided`."""
    return _gather[-1] if _gather else None


def token_parts() -> int:
    """Parts of the tokens."""
    return _divided[-1][1] if _divided else 1


def by_device(x: Tensor) -> tuple[Tensor, int]:
    """`[b, n, ...]` -> `[b n, ...]`, device by device, and the number of devices.

    A plain reshape would mix the devices' tokens if both axes are divided, and each device would send its tokens.
    """
    b, n, *rest = x.shape
    rows, tokens = _divided[-1] if _divided else (1, 1)
    if (rows, tokens) == (1, 1) or b % rows or n % tokens:
        return ops.reshape(x, (-1, *rest)), 1
    x = ops.reshape(x, (rows, b // rows, tokens, n // tokens, *rest))
    return ops.reshape(ops.swapaxes(x, 1, 2), (-1, *rest)), rows * tokens
