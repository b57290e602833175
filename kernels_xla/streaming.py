"""Buffers that rows fill at different pace."""

from keras import ops

from kernels_xla.spec import Tensor


def append(buffer: Tensor, new: Tensor, at: Tensor, valid: Tensor) -> Tensor:
    """Writes the first `valid[b]` tokens of `new[b]` into `buffer[b]`, from slot `at[b]` on.

    Args:
      buffer: `[b, m, ...]`.
      new: `[b, k, ...]`.
      at: int32 `[b]`.
      valid: int32 `[b]`, at most k.

    Returns:
      `[b, m, ...]`. What would stand past slot m is dropped: the caller sees to it that there is room.
    """
    source = ops.arange(buffer.shape[1], dtype="int32")[None] - at[:, None]  # [b, m]
    written = ops.logical_and(source >= 0, source < valid[:, None])
    return ops.where(like(written, new), rows(new, source), ops.cast(buffer, new.dtype))


def rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, index[b, m]]` for every row: `[b, n, ...]` and int32 `[b, m]` -> `[b, m, ...]`, indices clipped into n."""
    index = ops.clip(index, 0, ops.shape(x)[1] - 1)
    return ops.take_along_axis(x, like(index, x), axis=1)


def like(index: Tensor, x: Tensor) -> Tensor:
    """Appends axes of length 1 to `index` until it has the rank of `x`."""
    return ops.reshape(index, (*ops.shape(index), *[1] * (len(x.shape) - len(index.shape))))
