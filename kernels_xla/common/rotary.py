"""Rotary position embedding, and the relative bias built from it.

Source: Su et al., "RoFormer", arXiv:2104.09864. Pairs are half-split: channel i turns with channel i + s/2.
"""

import math

from keras import ops

from kernels_xla.common.accelerator import on_tpu
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.spec import KernelSpec, Tensor


def sinusoids(positions: Tensor, width: int, dtype: str = "float32", base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x base^(-i / h), for i = 0 .. h-1 and h = width / 2.

    Args:
      positions: Integers of any shape, at most int32. A program to be exported needs a runtime tensor here: a constant
        would store the tables in the program.
      width: s, even.
      dtype: float32 or float64. Nothing narrower works: bfloat16 cannot count past 256.
      base: The longest wavelength, divided by 2 pi.

    Returns:
      Two tensors `[..., s / 2]`, as exact at a million as at 1.
    """
    if width % 2:
        raise ValueError(f"rotary needs an even width, got {width}")
    half = width // 2
    frequencies = [base ** (-i / half) for i in range(half)]
    at = ops.expand_dims(positions, -1)
    if dtype == "float64":
        angles = ops.cast(at, dtype) * ops.convert_to_tensor(frequencies, dtype)
    else:
        angles = 2 * math.pi * _turns(at, [f / (2 * math.pi) for f in frequencies])
    return ops.cos(angles), ops.sin(angles)


def _turns(at, frequencies):
    """`at` x `frequencies` without whole turns, float32 in about -1/2 .. 1/2.

    A product in float32 loses the fraction as the number of turns grows: 0.06 of an angle at position 10^6. An int32
    that counts 2^-32 turns drops whole turns by its overflow, and rounds nothing.
    """
    counts = [round(f * 2**32) for f in frequencies]
    wrapped = ops.convert_to_tensor([(count + 2**31) % 2**32 - 2**31 for count in counts], "int32")
    rest = ops.convert_to_tensor([f - count / 2**32 for f, count in zip(frequencies, counts, strict=True)], "float32")
    return ops.cast(ops.cast(at, "int32") * wrapped, "float32") * 2.0**-32 + ops.cast(at, "float32") * rest


def rope_tables(
    positions: Tensor, width: int, dtype: str = "float32", base: float = 10_000.0, turning: int | None = None
) -> tuple[Tensor, Tensor]:
    """The cosines and sines with which `rotate` turns heads at `positions`, `[..., n]`. For arguments see `sinusoids`.

    With `turning`, only the first pairs turn, which have that many channels, as if there were no others.

    Returns:
      Cosines and sines, `[..., n, s / 2]`. On a TPU they are `[..., n, s]`, one number a channel, and the sines of the
      first half are negated.
    """
    cos, sin = sinusoids(positions, turning or width, dtype, base)
    if turning is not None:
        still = [*[[0, 0]] * (len(cos.shape) - 1), [0, (width - turning) // 2]]
        cos, sin = ops.pad(cos, still, constant_values=1.0), ops.pad(sin, still)
    if not on_tpu():
        return cos, sin
    both = ops.concatenate([cos, cos], axis=-1), ops.concatenate([-sin, sin], axis=-1)
    return tuple(made_once(table, positions) for table in both)


def made_once(table: Tensor, positions: Tensor) -> Tensor:
    """The same `table`, `[..., n, s]`, gathered with indices from `positions` that are known only at run time.

    XLA recomputes elementwise tables in every layer, forward and backward, and sines are expensive on a TPU. It keeps
    gathered tables.
    """
    zero = ops.minimum(ops.cast(ops.reshape(positions, (-1,))[0], "int32"), 0)  # no position is negative
    return ops.take(table, ops.arange(ops.shape(table)[-2], dtype="int32") + zero, axis=-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[..., i], x[..., i + s/2]) in float32. The result is in the dtype of `x`.

    Args:
      x: `[..., s]`.
      cos: Cosines from `rope_tables`, of the same rank or broadcastable.
      sin: Sines, as `cos`.
    """
    s = x.shape[-1]
    if cos.shape[-1] == s:  # a TPU rolls whole rows cheaply, but transposes halves
        swapped = ops.roll(x, s // 2, axis=-1)
        return ops.cast(ops.cast(x, cos.dtype) * cos + ops.cast(swapped, cos.dtype) * sin, x.dtype)
    pairs = ops.reshape(ops.cast(x, cos.dtype), (*ops.shape(x)[:-1], 2, s // 2))
    signs = ops.cast([[-1.0], [1.0]], cos.dtype)
    # On a GPU a flip fuses into one pass. Halves that are sliced and joined again take a pass over memory each.
    turned = pairs * ops.expand_dims(cos, -2) + ops.flip(pairs, axis=-2) * (ops.expand_dims(sin, -2) * signs)
    return ops.cast(ops.reshape(turned, (*ops.shape(turned)[:-2], s)), x.dtype)


def rotary(x: Tensor, positions: Tensor, *, base: float = 10_000.0) -> Tensor:
    """Rotates every head of `x` by its token's position.

    Args:
      x: `[b, n, h, s]`, s even.
      positions: int32 `[b, n]`, or `[1, n]` if all rows share them.
      base: See `rope_tables`.

    Returns:
      `[b, n, h, s]`, in the dtype of `x`.

    Cost:
      O(n h s), one pass, and O(n s) sines and cosines.

    Precision:
      Products are float32. Angles are exact to float32 at every position, because whole turns are dropped in integers.
    """
    cos, sin = rope_tables(positions, x.shape[-1], sum_dtype(x), base)
    return rotate(x, ops.expand_dims(cos, 2), ops.expand_dims(sin, 2))


def rotary_reference(x, positions, *, base=10_000.0):
    """Each pair as a 2 x 2 rotation matrix times a vector."""
    half = x.shape[-1] // 2
    angles = ops.cast(positions, x.dtype)[:, :, None, None] * base ** (-ops.arange(half, dtype=x.dtype) / half)
    matrix = ops.stack([ops.cos(angles), -ops.sin(angles), ops.sin(angles), ops.cos(angles)], axis=-1)
    matrix = ops.reshape(matrix, (*matrix.shape[:-1], 2, 2))  # [b, n, 1, s/2, 2, 2]
    pairs = ops.stack([x[..., :half], x[..., half:]], axis=-1)  # [b, n, h, s/2, 2]
    turned = ops.sum(matrix * pairs[..., None, :], axis=-1)
    return ops.concatenate([turned[..., 0], turned[..., 1]], axis=-1)


def relative_bias(a: Tensor, b: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor:
    """Toeplitz bias b_ij = rotate_i(a) . rotate_j(b). It depends only on i - j.

    Args:
      a: Learned, `[r]`.
      b: Learned, `[r]`. None if `a` has a bias for each distance, with i - j at place r / 2 + i - j.
      queries: Positions of the queries, `[..., i]`.
      keys: Positions of the keys, `[..., j]`.

    Returns:
      `[..., i, j]`, float32 (float64 for float64).
    """
    dtype = sum_dtype(a)
    if b is None:
        distances = ops.expand_dims(queries, -1) - ops.expand_dims(keys, -2)  # of pairs that no one sees, any
        return ops.take(ops.cast(a, dtype), ops.clip(distances + a.shape[0] // 2, 0, a.shape[0] - 1), axis=0)
    rows = rotate(ops.cast(a, dtype), *rope_tables(queries, a.shape[-1], dtype))  # [..., i, r]
    columns = rotate(ops.cast(b, dtype), *rope_tables(keys, b.shape[-1], dtype))  # [..., j, r]
    return ops.matmul(rows, ops.swapaxes(columns, -1, -2))


SPEC = KernelSpec(
    name="rotary",
    fast=rotary,
    reference=rotary_reference,
    stream=None,
    inputs={"x": "bnhs", "positions": "bn"},
    flops=lambda sizes, case: 3 * sizes["b"] * sizes["n"] * sizes["h"] * sizes["s"],
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=(),
    tokenwise=True,
)
