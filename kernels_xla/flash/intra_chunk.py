"""The first sum of mixed chunk attention: squared ReLU inside chunks. Its parallel form and its stream share it."""

from keras import ops

from kernels_xla.common.masks import zero_outside
from kernels_xla.common.rotary import relative_bias
from kernels_xla.common.spec import Tensor


def intra_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, b: Tensor | None, seen: Tensor, scale: str, offset=0
) -> Tensor:
    """The sum over the m keys of each chunk's window, of which the last c are its own.

    Args:
      q: `[b, g, c, s]`.
      k: `[b, g, m, s]`.
      v: `[b, g, m, e]`.
      a: See `mixed_chunk_attention`.
      b: As `a`.
      seen: `[c, m]` or `[b, g, c, m]`; None for all.
      scale: See `mixed_chunk_attention`.
      offset: As there.

    Returns:
      `[b, g, c, e]`.
    """
    (c, s), m = q.shape[2:], k.shape[2]
    content, added = factors(s, m, scale)
    scores = ops.einsum("bgis,bgjs->bgij", q * ops.cast(content, q.dtype), k)
    if a is not None:
        at = ops.arange(m, dtype="int32") + offset
        scores = scores + ops.cast(added * relative_bias(a, b, at[m - c :], at), scores.dtype)
    return ops.einsum("bgij,bgje->bgie", zero_outside(ops.square(ops.relu(scores)), seen), v)


def factors(s: int, m: int, scale: str) -> tuple[float, float]:
    """Both scales are relu(content q . k + added bias)^2; on q the factor touches s numbers a token instead of m."""
    return ((s * m) ** -0.5, m**-0.5) if scale == "normalized" else (1.0 / m, 1.0)


def with_previous(x: Tensor, before: Tensor | None = None) -> Tensor:
    """Each chunk behind the one before it: `[b, g, c, ...]` -> `[b, g, 2c, ...]`.

    Args:
      x: Chunks.
      before: What stands before the first, `[b, c, ...]`; None for zeros.
    """
    earlier = ops.pad(x, [[0, 0], [1, 0], *[[0, 0]] * (len(x.shape) - 2)])[:, :-1]
    if before is not None:
        earlier = ops.concatenate([before[:, None], x[:, :-1]], axis=1)
    return ops.concatenate([earlier, x], axis=2)
