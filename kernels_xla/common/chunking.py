"""Shapes and sums of chunks for the chunked kernels. Nothing here belongs to a single mixer."""

import math

from keras import ops

from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.masks import zero_outside
from kernels_xla.common.sharding import token_parts
from kernels_xla.common.spec import Tensor

GROUP = 256  # chunks in one triangular product; up to about 200 it costs no more than reading and writing them


def _group(chunks: int) -> int:
    """Chunks in one triangular product. A group lies on one device, so that devices exchange sums of groups alone."""
    devices = token_parts()
    if devices == 1 or chunks % devices or chunks == devices:
        return GROUP
    share = chunks // devices
    size = max(size for size in range(1, GROUP + 1) if share % size == 0)
    return size if size > 1 else GROUP


def fold(x: Tensor, chunk: int) -> Tensor:
    """Cuts `[b, n, ...]` into `[b, g, c, ...]`, after padding n with zeros to a multiple of `chunk`."""
    if isinstance(chunk, int) and chunk < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk}")
    shape = ops.shape(x)
    tail = (chunk - shape[1] % chunk) % chunk  # not -n % c, whose sign converters to ONNX get wrong
    if not (isinstance(tail, int) and tail == 0):
        x = ops.pad(x, [[0, 0], [0, tail], *[[0, 0]] * (len(shape) - 2)])
    chunks = (shape[1] + tail) // chunk  # not -1, which JAX cannot tell if b is 0
    return ops.reshape(x, (shape[0], chunks, chunk, *shape[2:]))


def unfold(x: Tensor, n: int | Tensor) -> Tensor:
    """Undoes `fold` and drops its padding: `[b, g, c, ...]` -> `[b, n, ...]`."""
    shape = ops.shape(x)
    return ops.reshape(x, (shape[0], shape[1] * shape[2], *shape[3:]))[:, :n]


def edges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The documents of the first and the last real token of each chunk.

    Args:
      ids: Documents, int32 `[b, g, c]`, 0 at padding.

    Returns:
      Two int32 `[b, g]`, 0 where a chunk is all padding.
    """
    real = ops.cast(ids > 0, "int32")
    first = ops.argmax(real, axis=-1, keepdims=True)
    last = ids.shape[-1] - 1 - ops.argmax(ops.flip(real, axis=-1), axis=-1, keepdims=True)
    return tuple(ops.take_along_axis(ids, ops.cast(at, "int32"), axis=-1)[..., 0] for at in (first, last))


def sum_of_earlier(x: Tensor, first: Tensor | None = None, last: Tensor | None = None) -> Tensor:
    """y[g] = sum of x[h] over chunks h < g. With documents, only chunks whose last document continues into g count.

    A masked triangular product is faster on an accelerator than a cumulative sum, but it is quadratic in G. We
    therefore multiply within groups of `GROUP` chunks. The same sum over groups gives the part that enters a group,
    so the cost is linear in G.

    Args:
      x: Sums of each chunk, float `[b, g, ...]`. With documents, each sum covers the chunk's last document only.
      first: Document of the first real token of each chunk, `[b, g]`. This document reads the sums.
      last: Document of the last real token, `[b, g]`. Its sums are read. A document must be one run of tokens.

    Returns:
      The shape of `x`.
    """
    return _directed(x, first, last, later=False)


def sum_of_later(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """y[g] = sum of x[h] over chunks h > g with the last document of g. Each x covers the chunk's first document."""
    return _directed(x, last, first, later=True)


def _directed(x, reads, read, later):
    """The sum of the chunks before or after: those whose document `read` is the one that `reads`."""
    shape = ops.shape(x)
    features = math.prod(x.shape[2:])
    return ops.reshape(_others(ops.reshape(x, (*shape[:2], features)), reads, read, later), shape)


def _others(x, reads=None, read=None, later=False):
    """`_directed` on `[b, g, f]`."""
    chunks = x.shape[1]
    # Of an unknown number of chunks at most so many are in a group: a short text would pay for the zeros behind it.
    group = _group(chunks) if chunks is not None else ops.minimum(ops.maximum(ops.shape(x)[1], 1), GROUP)
    if chunks is not None and chunks <= group:
        return _triangular(x, reads, read, later)
    grouped = fold(x, group)  # [b, m, group, f]
    over_groups = _triangular if chunks is None else _others  # one product if the number of groups is unknown
    if reads is None:
        entering = over_groups(_sum(grouped))[:, :, None]
        return unfold(_triangular(grouped) + entering, ops.shape(x)[1])
    reads, read = fold(reads, group), fold(read, group)  # [b, m, group]
    enters, leaves = (slice(-1, None), slice(0, 1)) if later else (slice(0, 1), slice(-1, None))  # sides of a group
    passed_on = zero_outside(grouped, (read == read[:, :, leaves])[..., None])  # the document that continues past it
    entering = over_groups(_sum(passed_on), reads[:, :, enters][..., 0], read[:, :, leaves][..., 0], later)
    entering = zero_outside(entering[:, :, None], (reads == reads[:, :, enters])[..., None])
    return unfold(_triangular(grouped, reads, read, later) + entering, ops.shape(x)[1])


def _sum(x):
    """`[b, m, g, f]` -> `[b, m, f]`, accumulated in float32."""
    return ops.cast(ops.sum(ops.cast(x, sum_dtype(x)), axis=2), x.dtype)


def _triangular(x, reads=None, read=None, later=False):
    """The sum as one product over the second-last axis: x `[..., g, f]`, documents `[..., g]`."""
    at = ops.arange(ops.shape(x)[-2], dtype="int32")
    seen = at[None, :] > at[:, None] if later else at[None, :] < at[:, None]  # [g, h]
    if reads is not None:
        seen = ops.logical_and(seen, ops.expand_dims(reads, -1) == ops.expand_dims(read, -2))
    lead = ops.shape(x)[:-2]
    # Both operands have a batch. With one matrix for all rows, XLA transposes the sums before and after the product.
    seen = ops.broadcast_to(ops.cast(seen, x.dtype), (*lead, *ops.shape(seen)[-2:]))
    return ops.matmul(seen, x)
