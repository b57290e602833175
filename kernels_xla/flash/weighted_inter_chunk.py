"""The second sum of weighted chunks: linear attention across chunks, with a weight for each chunk."""

import math

from keras import ops

from kernels_xla.common import accumulate
from kernels_xla.common.chunking import edges
from kernels_xla.common.joint_softmax import LOW
from kernels_xla.common.masks import zero_outside
from kernels_xla.common.spec import Tensor
from kernels_xla.flash import inter_chunk


def weighted_inter_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, sum_q: Tensor, sum_k: Tensor, ids: Tensor, packed: bool, causal: bool
) -> Tensor:
    """The weighted sum over the visible chunks, inside the document of each token.

    Args:
      q: `[b, g, c, s]`.
      k: `[b, g, c, s]`.
      v: `[b, g, c, e]`, 0 at padding.
      sum_q: `[b, g, c, s]`.
      sum_k: `[b, g, c, s]`.
      ids: Documents, int32 `[b, g, c]` or `[1, g, c]`, 0 at padding.
      packed: Whether a row may hold several documents.
      causal: Whether only the chunks before are visible, instead of all.

    Returns:
      `[b, g, c, e]`.
    """
    # A document continues from the end of one chunk into the start of the next. Other chunks therefore read only the
    # last document of a chunk, or its first. A part `p` of a chunk is its tokens of one document.
    first, last = edges(ids)
    if causal:
        read, reads = last[..., None], first[..., None]  # [b, g, p]
    else:
        both = [first, ops.where(last == first, 0, last)] if packed else [first]
        read = reads = ops.stack(both, axis=-1)
    part = _tokens_of(ids, read)  # [b, g, p, c]
    count = ops.sum(ops.cast(part, accumulate.sum_dtype(v)), axis=-1)
    q_mean, k_mean = (_mean(x, part, count) for x in (sum_q, sum_k))
    if causal:  # the mean of the chunk before; the first chunk has none
        q_mean = ops.pad(q_mean, [[0, 0], [1, 0], [0, 0], [0, 0]])[:, :-1]
    summaries = ops.einsum("bgpjs,bgje->bgpse", zero_outside(k[:, :, None], part[..., None]), v)

    q_mean, k_mean, count, of_read, of_reads = (_flat(x, 1) for x in (q_mean, k_mean, count, read, reads))
    seen = ops.logical_and(of_reads[:, :, None] == of_read[:, None], of_read[:, None] > 0)  # [b, m, m]
    if causal:
        at = ops.arange(ops.shape(seen)[1], dtype="int32")
        seen = ops.logical_and(seen, at < at[:, None])
    weights = ops.cast(token_weights(q_mean, k_mean, count, seen), v.dtype)
    sums = ops.reshape(ops.einsum("bmk,bkse->bmse", weights, _flat(summaries, 1)), ops.shape(summaries))
    out = ops.einsum("bgpis,bgpse->bgie", zero_outside(q[:, :, None], _tokens_of(ids, reads)[..., None]), sums)
    if causal or not packed:
        return out
    # A document that lies between others inside a chunk has no other chunk, so its tokens have the same weight.
    inner = ops.logical_and(ids != first[..., None], ids != last[..., None])[..., None]
    return ops.where(inner, inter_chunk.inter_chunk_attention(q, k, v, None, ids, ids, causal), out)


def token_weights(q: Tensor, k: Tensor, count: Tensor, seen: Tensor) -> Tensor:
    """The weight of a token of chunk k for chunk m: a softmax over tokens, each with the score of its chunk.

    Args:
      q: Means of queries, `[b, m, s]`, in `sum_dtype`.
      k: Means of keys, `[b, k, s]`.
      count: Number of tokens of each chunk, in the same dtype, broadcastable to `[b, k]`.
      seen: Whether m sees k, bool `[b, m, k]`.

    Returns:
      `[b, m, k]`. The sum over all tokens is 1 for each m, or 0 if m sees none.
    """
    scores = ops.where(seen, accumulate.einsum("bms,bks->bmk", q, k) / math.sqrt(q.shape[-1]), LOW)
    highest = ops.stop_gradient(ops.max(scores, axis=-1, keepdims=True))
    weights = zero_outside(ops.exp(scores - highest), seen)
    total = ops.sum(weights * count[..., None, :], axis=-1, keepdims=True)
    return weights / ops.where(total > 0, total, 1)  # a maximum would halve the gradient at a total of exactly 1


def _tokens_of(ids, documents):
    """Which tokens belong to each document: `[b, g, c]`, `[b, g, p]` -> `[b, g, p, c]`; none to document 0."""
    same = ids[:, :, None] == documents[..., None]
    return ops.logical_and(same, documents[..., None] > 0)


def _mean(x, part, count):
    """The mean of `[b, g, c, s]` over the tokens of each part `[b, g, p, c]`: `[b, g, p, s]`; 0 for an empty part."""
    x = zero_outside(ops.cast(x, count.dtype)[:, :, None], part[..., None])
    return ops.sum(x, axis=3) / ops.maximum(count, 1)[..., None]


def _flat(x, axis):
    """Joins two axes: `[b, g, p, ...]` -> `[b, g p, ...]`."""
    shape = ops.shape(x)
    return ops.reshape(x, (*shape[:axis], -1, *shape[axis + 2 :]))
