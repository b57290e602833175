"""Positions of tokens. They start again with each packed document."""

import numpy as np
from keras import ops

from flash_tf.layers.masking import check_integers
from kernels_xla.common.spec import Tensor


def token_positions(x: Tensor, segment_ids: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """Positions int32 `[1, n]`, or `[b, n]` if packed: each token's distance from the start of its document.

    Args:
      x: Anything `[b, n, ...]`.
      segment_ids: `[b, n]`, each document one run of equal numbers; None for one document a row.
      positions: What a user gives in their place, `[1, n]` or `[b, n]`.

    Raises:
      ValueError: `positions` have another shape, as far as that is known, or are floats of 16 bits, which are rounded.
    """
    if positions is not None:
        check_integers("positions", positions)
        if getattr(getattr(positions, "shape", None), "rank", 0) is None:
            return positions  # inside a function of TensorFlow nothing may be known
        (b, n), got = tuple(x.shape[:2]), tuple(np.shape(positions))
        alike = lambda size, other: size == other or None in (size, other)  # noqa: E731
        if len(got) != 2 or not alike(got[1], n) or not (got[0] == 1 or alike(got[0], b)):
            raise ValueError(f"positions need the shape [1, n] or [b, n] of a text {(b, n)}, got {got}")
        return positions
    n = ops.shape(x)[1]
    at = ops.arange(n, dtype="int32")[None]
    if segment_ids is None:
        return at
    ids = ops.cast(segment_ids, "int32")
    starts = ops.concatenate([ops.ones_like(ids[:, :1], dtype="bool"), ids[:, 1:] != ids[:, :-1]], axis=1)
    return at - _running_maximum(ops.where(starts, at, 0))


def runtime_zero(x: Tensor) -> Tensor:
    """A zero that no compiler can know before the program runs: min(first number of `x`, 0), 0 for an empty `x`.

    A compiler stores tables of sines and cosines over constant positions in the exported program, at every use.

    Args:
      x: Integers that are never negative, of any shape: token ids, positions.
    """
    return ops.minimum(ops.sum(ops.cast(ops.reshape(x, (-1,))[:1], "int32")), 0)


def _running_maximum(x):
    """Running maximum of non-negative integers along axis 1, by log2(n) shifted maxima."""
    n, shift = x.shape[1], 1
    while shift < (n or 2**24):
        x = ops.maximum(x, ops.pad(x, [[0, 0], [shift, 0]])[:, : ops.shape(x)[1]])
        shift *= 2
    return x
