"""Mixed chunk attention as three tensors that have all of its masks, for kernels that only multiply and add."""

from typing import NamedTuple

from keras import ops

from kernels_xla.common.chunking import edges, fold, sum_of_earlier, sum_of_later
from kernels_xla.common.masks import attention_mask, zero_outside
from kernels_xla.common.spec import Tensor
from kernels_xla.flash.inter_chunk import count_earlier, divided
from kernels_xla.flash.intra_chunk import intra_chunk_weights


class Operands(NamedTuple):
    """out = weights v + q S, where S sums k^T v over other chunks.

    Attributes:
      weights: Of the pairs in a chunk, `[b, g, c, c]`.
      q: `[b, g, c, t]`. t is s, or 2s in packed rows without order: sums over earlier chunks, then over later ones.
      k: `[b, g, c, t]`.
      first: The document whose tokens read sums of earlier chunks, `[b, g]`; None unless packed.
      last: The document whose sums later chunks read, `[b, g]`; None unless packed.
    """

    weights: Tensor
    q: Tensor
    k: Tensor
    first: Tensor | None
    last: Tensor | None


def operands(
    quad_q: Tensor,
    quad_k: Tensor,
    lin_q: Tensor,
    lin_k: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    *,
    chunk_size: int,
    causal: bool,
    scale: str,
    chunk_divisor: bool,
    ids: Tensor | None,
    packed: bool,
    offset: int | Tensor = 0,
) -> Operands:
    """The operands of `mixed_chunk_attention`, which has the same arguments.

    Args:
      quad_q: `[b, n, s]`, as the other three.
      quad_k: See `quad_q`.
      lin_q: See `quad_q`.
      lin_k: See `quad_q`.
      a: See `mixed_chunk_attention`, as all but the last three.
      b: See `mixed_chunk_attention`.
      chunk_size: c.
      causal: Whether position i may depend only on positions <= i.
      scale: The place of the divisor.
      chunk_divisor: Whether the second sum is divided by c.
      ids: Documents, `[b, n]`, 0 at padding; None if all tokens are one document.
      packed: Whether a row may hold several documents.
      offset: Added to the positions of the bias.
    """
    n, at = ops.shape(quad_q)[1], ops.arange(chunk_size, dtype="int32")
    if ids is None and not causal and n % chunk_size:
        ids = ops.ones((1, n), "int32")  # values that fill the last chunk are not zero, but silu of their bias
    q1, k1, q2, k2, ids = (None if x is None else fold(x, chunk_size) for x in (quad_q, quad_k, lin_q, lin_k, ids))
    seen = attention_mask(ids, ids, at, at, causal)
    weights = intra_chunk_weights(q1, k1, a, b, seen, scale, offset)
    divisor = chunk_size if chunk_divisor else None
    if packed:
        return _packed(weights, q2, k2, ids, causal, divisor)
    real = None if ids is None else (ids > 0)[..., None]
    tokens = divisor or _tokens(q2, n, ids, causal)
    q2 = divided(q2, tokens if isinstance(tokens, int) else tokens[..., None, None])
    return Operands(weights, zero_outside(q2, real), zero_outside(k2, real), None, None)


def _tokens(q, n, ids, causal):
    """The number of tokens that a chunk's second sum reads, `[b, g]`, `[1, g]` or `[b, 1]`."""
    if causal:
        full = ops.full((1, ops.shape(q)[1]), q.shape[2], dtype="int32")
        return count_earlier(full if ids is None else ops.sum(ops.cast(ids > 0, "int32"), axis=-1))
    return n if ids is None else ops.sum(ops.cast(ids > 0, "int32"), axis=(1, 2))[:, None]


def _packed(weights, q, k, ids, causal, divisor):
    first, last = _edges(ids)
    at_first, at_last = ((ids == edge[..., None]) & (ids > 0) for edge in (first, last))  # [b, g, c]
    count = lambda x: ops.sum(ops.cast(x, "float32"), axis=-1)  # noqa: E731
    earlier = sum_of_earlier(count(at_last), first, last)[..., None]  # [b, g, 1]
    mask = lambda x, where: zero_outside(x, where[..., None])  # noqa: E731
    if causal:
        q = divided(q, (earlier if divisor is None else ops.full_like(earlier, divisor))[..., None])
        return Operands(weights, mask(q, at_first), mask(k, at_last), first, last)
    same = attention_mask(ids, ids, None, None, causal=False)  # [b, g, c, c]
    later = sum_of_later(count(at_first), first, last)[..., None]
    tokens = count(same) + ops.where(at_first, earlier, 0.0) + ops.where(at_last, later, 0.0)
    q = divided(q, tokens[..., None] if divisor is None else divisor)
    own = zero_outside(ops.einsum("bgis,bgjs->bgij", q, k), same)
    q = ops.concatenate([mask(q, at_first), mask(q, at_last)], axis=-1)
    k = ops.concatenate([mask(k, at_last), mask(k, at_first)], axis=-1)
    return Operands(weights + own, q, k, first, last)


def _edges(ids):
    """`edges`, but a chunk of padding has the last document before it, so that sums pass through the chunk."""
    first, last = edges(ids)
    at = ops.arange(ids.shape[1], dtype="int32")
    before = (at[:, None] >= at) & (last > 0)[:, None]  # [b, g, h]
    nearest = ops.max(ops.where(before, at, 0), axis=-1)  # [b, g]
    filled = ops.take_along_axis(last, nearest, axis=1)
    return ops.where(first > 0, first, filled), ops.where(last > 0, last, filled)
