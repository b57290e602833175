"""The first sum of mixed chunk attention, for training and for decoding: squared ReLU inside chunks."""

from keras import ops

from kernels_xla.common.masks import zero_outside
from kernels_xla.common.rotary import relative_bias
from kernels_xla.common.spec import Tensor


def intra_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, b: Tensor | None, seen: Tensor, scale: str, offset=0
) -> Tensor:
    """The sum over the m keys of each chunk's window. The last c keys are the chunk's own.

    Args:
      q: `[b, g, c, s]`.
      k: `[b, g, m, s]`.
      v: `[b, g, m, e]`.
      a: See `mixed_chunk_attention`.
      b: As `a`.
      seen: `[c, m]` or `[b, g, c, m]`; None for all.
      scale: See `mixed_chunk_attention`.
      offset: See `mixed_chunk_attention`.

    Returns:
      `[b, g, c, e]`.
    """
    return ops.einsum("bgij,bgje->bgie", intra_chunk_weights(q, k, a, b, seen, scale, offset), v)


def intra_chunk_weights(
    q: Tensor, k: Tensor, a: Tensor | None, b: Tensor | None, seen: Tensor, scale: str, offset=0
) -> Tensor:
    """The weights of `intra_chunk_attention`, `[b, g, c, m]`, with the same arguments."""
    (c, s), m = q.shape[2:], k.shape[2]
    content, added = factors(s, m, scale)
    scores = ops.einsum("bgis,bgjs->bgij", q * ops.cast(content, q.dtype), k)
    if a is not None:
        at = ops.arange(m, dtype="int32") + offset
        scores = scores + ops.cast(added * relative_bias(a, b, at[m - c :], at), scores.dtype)
    return zero_outside(ops.square(ops.relu(scores)), seen)


def factors(s: int, m: int, scale: str) -> tuple[float, float]:
    """The factors (content, added) with which both scales are relu(content q . k + added bias)^2.

    The first factor goes on q, which has s numbers a token, not on the m scores.
    """
    return ((s * m) ** -0.5, m**-0.5) if scale == "normalized" else (1.0 / m, 1.0)


def with_previous(x: Tensor, before: Tensor | None = None) -> Tensor:
    """Each chunk, after the chunk before it: `[b, g, c, ...]` -> `[b, g, 2c, ...]`.

    Args:
      x: Chunks.
      before: The chunk before the first, `[b, c, ...]`; None for zeros.
    """
    earlier = ops.pad(x, [[0, 0], [1, 0], *[[0, 0]] * (len(x.shape) - 2)])[:, :-1]
    if before is not None:
        earlier = ops.concatenate([before[:, None], x[:, :-1]], axis=1)
    return ops.concatenate([earlier, x], axis=2)
