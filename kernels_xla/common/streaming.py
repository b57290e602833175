"""Code of streams: buffers that rows fill at a different pace, and the relative bias of one query a row."""

from collections.abc import Callable

from keras import ops

from kernels_xla.common.masks import zero_outside
from kernels_xla.common.rotary import relative_bias
from kernels_xla.common.spec import Tensor


def append(buffer: Tensor, new: Tensor, at: Tensor, valid: Tensor | None) -> Tensor:
    """Writes the first `valid[b]` tokens of `new[b]` into `buffer[b]`, from slot `at[b]` on.

    Args:
      buffer: `[b, m, ...]`.
      new: `[b, k, ...]`.
      at: int32 `[b]`.
      valid: int32 `[b]`, at most k; None for k.

    Returns:
      `[b, m, ...]`. Tokens past slot m are dropped, so the caller must leave room.

    Cost:
      One token a row is written in place if the compiler can. More tokens take a pass over the buffer.
    """
    slots = buffer.shape[1]
    new = ops.cast(new, buffer.dtype)
    if new.shape[1] == 1:
        written = at < slots if valid is None else ops.logical_and(at < slots, valid > 0)
        at = ops.minimum(at, slots - 1)
        return put(buffer, ops.where(like(written, new[:, 0]), new[:, 0], gather_tokens(buffer, at[:, None])[:, 0]), at)
    valid = ops.full_like(at, ops.shape(new)[1]) if valid is None else valid
    source = ops.arange(slots, dtype="int32")[None] - at[:, None]  # [b, m]
    written = ops.logical_and(source >= 0, source < valid[:, None])
    return ops.where(like(written, new), gather_tokens(new, source), buffer)


def put(buffer: Tensor, new: Tensor, at: Tensor) -> Tensor:
    """Writes `new[b]` into slot `at[b]` of `buffer[b]`: `[b, m, ...]`, `[b, ...]`, int32 `[b]`; 0 <= at < m.

    XLA runs both forms in place. A choice between two buffers would be a pass over both, and a scatter of a single row
    would take two steps.
    """
    if buffer.shape[0] == 1:
        zero = ops.zeros((), "int32")
        return ops.slice_update(buffer, (zero, at[0], *[zero] * (len(buffer.shape) - 2)), new[:, None])
    return ops.scatter_update(buffer, ops.stack([ops.arange(ops.shape(at)[0], dtype="int32"), at], axis=1), new)


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, index[b, m]]` for every row: `[b, n, ...]` and int32 `[b, m]` -> `[b, m, ...]`, indices clipped into n."""
    index = ops.clip(index, 0, ops.shape(x)[1] - 1)
    return ops.take_along_axis(x, like(index, x), axis=1)


def slice_tokens(x: Tensor, start: Tensor, length: int) -> Tensor:
    """`length` tokens of each row from `start[b]` on: `[b, n, ...]` and int32 `[b]` -> `[b, length, ...]`."""
    return gather_tokens(x, start[:, None] + ops.arange(length, dtype="int32"))


def on_grid(buffer: Tensor, new: Tensor, fill: Tensor, valid: Tensor) -> Tensor:
    """Places each row's open chunk and its new tokens on the row's own grid of chunks.

    Args:
      buffer: The open chunk, `[b, c, ...]`. Its first `fill[b]` slots are taken.
      new: `[b, k, ...]`. The first `valid[b]` tokens are real.
      fill: int32 `[b]`, below c.
      valid: int32 `[b]`.

    Returns:
      `[b, m, ...]`, where m is the least multiple of c with room at any fill. Free slots are 0.
    """
    c, tokens = buffer.shape[1], ops.shape(new)[1]
    slots = ops.arange((tokens + 2 * c - 2) // c * c, dtype="int32")[None]
    arrived = slots - fill[:, None]  # [b, m], index of the new token for a slot
    both = ops.concatenate([buffer, ops.cast(new, buffer.dtype)], axis=1)
    laid = gather_tokens(both, ops.where(arrived < 0, slots, arrived + c))
    return zero_outside(laid, like(slots < (fill + valid)[:, None], laid))


def leave_grid(grid: Tensor, filled: Tensor, c: int) -> Tensor:
    """The open chunk after `filled[b]` slots of a grid from `on_grid`: `[b, m, ...]` -> `[b, c, ...]`."""
    left = slice_tokens(grid, filled - filled % c, c)
    return zero_outside(left, like(ops.arange(c, dtype="int32") < (filled % c)[:, None], left))


def filled(before: Tensor, after: Tensor, c: int) -> Tensor:
    """Whether a new token filled its row's open chunk, from positions before and after it: int32 `[b]` -> bool."""
    return ops.logical_and(after % c == 0, after > before)


def when_full(full: Tensor, close: Callable, *kept: Tensor) -> tuple:
    """`close(full, *kept)` if the chunk of any row is full, else `kept`. A row fills a chunk once in c steps.

    It is a loop of one pass or none, because XLA updates the variables of a loop in place.
    """
    body = lambda full, *kept: (ops.zeros_like(full), *close(full, *kept))  # noqa: E731
    return ops.while_loop(lambda full, *kept: ops.any(full), body, (full, *kept))[1:]


def emptied(full: Tensor, *buffers: Tensor) -> tuple:
    """Open chunks `[b, c, ...]`, set to zeros in rows that are `full`."""
    left = ops.logical_not(full)
    return tuple(zero_outside(x, like(left, x)) for x in buffers)


def like(index: Tensor, x: Tensor) -> Tensor:
    """Appends axes of length 1 to `index` until it has the rank of `x`."""
    return ops.reshape(index, (*ops.shape(index), *[1] * (len(x.shape) - len(index.shape))))


def runtime_zero(position: Tensor) -> Tensor:
    """A zero that is unknown before run time, so that the compiler stores no table made from it."""
    return ops.minimum(position[0], 0)


def bias_by_distance(a: Tensor, b: Tensor, n: int, zero: Tensor) -> Tensor:
    """The relative bias of the distances 0 .. n-1: `[n]`, float32. It depends only on weights.

    Args:
      a: `[r]`; see `relative_bias`.
      b: `[r]`.
      n: Number of distances.
      zero: The result of `runtime_zero`.
    """
    return relative_bias(a, b, ops.arange(n, dtype="int32") + zero, ops.zeros((1,), "int32"))[:, 0]
