"""Code of attention through a few tokens: numbers of real tokens, means of segments, an inverse, draws. No kernel.

A padded text counts as the text of its real tokens. They are numbered 0 .. m-1 in order, and everything here is placed,
counted or drawn by these numbers. A text therefore gives the same result alone and padded.
"""

import numpy as np
from keras import ops

from kernels_xla.common.accumulate import einsum, sum_dtype
from kernels_xla.common.masks import zero_outside
from kernels_xla.common.spec import Tensor
from kernels_xla.common.streaming import gather_tokens

STEPS = 6  # iterations of the inverse, in both papers


def real(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """`x [b, n, h, s]` with zeros at padding."""
    return zero_outside(x, None if padding_mask is None else padding_mask[:, :, None, None])


def numbers(x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The number of each real token of `x [b, n, ...]`, and how many there are.

    Returns:
      int32 `[b, n]`, arbitrary at padding, and int32 `[b]`. Without a mask b is 1 in both.
    """
    if padding_mask is None:
        at = ops.arange(ops.shape(x)[1], dtype="int32")[None]
        return at, ops.max(at, axis=1) + 1
    counted = ops.cumsum(ops.cast(padding_mask, "int32"), axis=1)
    return counted - 1, counted[:, -1]


def positions_of(wanted: Tensor, padding_mask: Tensor | None) -> Tensor:
    """The positions of the real tokens with the numbers `wanted [b, m]`, int32 `[b, m]`."""
    if padding_mask is None:
        return wanted
    n = ops.shape(padding_mask)[1]
    at = ops.arange(n, dtype="int32")[None]
    return gather_tokens(ops.cast(ops.argsort(ops.where(padding_mask, at, at + n), axis=1), "int32"), wanted)


def draws(seed: int, count: int) -> np.ndarray:
    """`count` random int32 integers, the same for the same seed. Modulo any m, they are random numbers below m."""
    return np.random.default_rng(seed).integers(2**31 - 1, size=count).astype("int32")


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, index[b, m]]` for every row: `[b, n, ...]` and int32 `[b, m]` -> `[b, m, ...]`, indices clipped into n.

    The result is the same as of `streaming.gather_tokens`, but whole vectors are taken. An index for each number of
    `[b, m, ...]` would be as large as the result, which may be most of a text.
    """
    b, n = ops.shape(x)[0], ops.shape(x)[1]
    at = ops.clip(index, 0, n - 1) + n * ops.arange(b, dtype="int32")[:, None]
    return ops.take(ops.reshape(x, (-1, *ops.shape(x)[2:])), at, axis=0)


def segments(x: Tensor, padding_mask: Tensor | None, count: int) -> Tensor:
    """Whether token i is in segment t, bool `[b, n, t]`: real token a of m is in segment a * count // m.

    Lengths differ by one token at most. If there are fewer tokens than segments, some segments are empty.
    """
    at, m = numbers(x, padding_mask)
    segment = at * count // ops.maximum(m, 1)[:, None]
    member = segment[..., None] == ops.arange(count, dtype="int32")
    return member if padding_mask is None else ops.logical_and(member, padding_mask[..., None])


def means(x: Tensor, member: Tensor) -> Tensor:
    """The mean of each segment: `x [b, n, h, s]`, `member [b, n, t]` -> `[b, t, h, s]`; 0 for an empty segment."""
    # Float32 from the start: XLA on CPUs has no product of this shape that sums bfloat16 in float32.
    dtype = sum_dtype(x)
    member = ops.broadcast_to(ops.cast(member, dtype), (*ops.shape(x)[:2], member.shape[-1]))
    total, size = ops.einsum("bnt,bnhs->bths", member, ops.cast(x, dtype)), ops.sum(member, axis=1)
    return ops.cast(total / ops.maximum(size, 1)[..., None, None], x.dtype)


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """An iterative pseudo-inverse K^+ of K, `[..., t, t]` (Razavi et al. 2014), as in Nystromformer's equation 11.

    V <- V / 4 (13 - K V (15 - K V (7 - K V))). V starts as K^T, divided by the largest row sum of |K| and by its
    largest column sum. Each matrix has its own sums, so no text depends on other texts of its batch. Rows and columns
    of zeros stay zeros.
    """
    size, identity = ops.abs(matrix), ops.eye(matrix.shape[-1], dtype=matrix.dtype)
    scale = ops.max(ops.sum(size, axis=-1), axis=-1) * ops.max(ops.sum(size, axis=-2), axis=-1)
    scale = ops.where(scale > 0, scale, ops.ones_like(scale))[..., None, None]
    found = ops.swapaxes(matrix, -1, -2) / scale
    for _ in range(STEPS):
        product = ops.matmul(matrix, found)
        inner = ops.matmul(product, 7 * identity - product)
        found = ops.matmul(found, 13 * identity - ops.matmul(product, 15 * identity - inner)) / 4
    return found


def gaussian(q: Tensor, k: Tensor) -> Tensor:
    """exp(-|q - k|^2 / (2 sqrt(s))) of all pairs: `[b, i, h, s]`, `[b, j, h, s]` -> `[b, h, i, j]` in float32.

    This is Skyformer's kernel (Chen et al., arXiv:2111.00035, section 3). It equals softmax's exp(q . k / sqrt(s)),
    divided by the square roots of exp(q . q / sqrt(s)) and exp(k . k / sqrt(s)).
    """
    square = lambda x: ops.transpose(ops.sum(ops.square(ops.cast(x, sum_dtype(x))), axis=-1), (0, 2, 1))  # noqa: E731
    products = einsum("bihs,bjhs->bhij", q, k)
    return ops.exp((products - (square(q)[..., None] + square(k)[:, :, None]) / 2) / q.shape[-1] ** 0.5)


def flops(sizes, case):
    """FLOPs of tokens with landmarks both ways, among landmarks, and of four products a step of the inverse.

    The means are not products and are not counted.
    """
    n, t, widths = sizes["n"], case["landmarks"], sizes["s"] + sizes["e"]
    return 2 * sizes["b"] * sizes["h"] * (2 * n * t * widths + t * t * widths + 4 * STEPS * t**3)
