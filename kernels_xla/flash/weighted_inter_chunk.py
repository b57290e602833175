"""The second sum of weighted chunks: linear attention across chunks, each under a weight."""

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
    """The sum over the chunks seen, of what the documents that cross chunks have in each.

    Args:
      q: `[b, g, c, s]`.
      k: `[b, g, c, s]`.
      v: `[b, g, c, e]`, 0 at padding.
      sum_q: `[b, g, c, s]`.
      sum_k: `[b, g, c, s]`.
      ids: Documents, int32 `[b, g, c]` or `[1, g, c]`, 0 at padding.
      packed: Whether there may be more than one in a row.
      causal: Whether the chunks seen are those before, rather than all.

    Returns:
      `[b, g, c, e]`.
    """
    # A document runs from the end of one chunk into the start of the next: others read its part in a chunk as that of
    # the last document there, or the first. A part `p` of a chunk is its tokens of one document.
    first, last = edges(ids)
    if causal:
        read, reads = last[..., None], first[..., None]  # [b, g, p]
    else:
        both = [first, ops.where(last == first, 0, last)] if packed else [first]
        read = reads = ops.stack(both, axis=-1)
    part = _tokens_of(ids, read)  # [b, g, p, c]
    count = ops.sum(ops.cast(part, accumulate.sum_dtype(v)), axis=-1)
    q_mean, k_mean = (_mean(x, part, count) for x in (sum_q, sum_k))
    if causal:  # of the chunk before: none before the first
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
    # One that lies between others inside its chunk has no other chunk, so that its tokens weigh the same.
    inner = ops.logical_and(ids != first[..., None], ids != last[..., None])[..., None]
    return ops.where(inner, inter_chunk.inter_chunk_attention(q, k, v, None, ids, ids, causal), out)


def token_weights(q: Tensor, k: Tensor, count: Tensor, seen: Tensor) -> Tensor:
    """What a token of each chunk k weighs for chunk m: softmax over tokens, each with the score of its chunk.

    Args:
      q: Means of queries, `[b, m, s]`, in the dtype of sums.
      k: Means of keys, `[b, k, s]`.
      count: Tokens of each, of that dtype, to broadcast with `[b, k]`.
      seen: Whether m sees k, bool `[b, m, k]`.

    Returns:
      `[b, m, k]`; a row's sum over tokens is 1, or 0 where it sees none.
    """
    scores = ops.where(seen, accumulate.einsum("bms,bks->bmk", q, k) / math.sqrt(q.shape[-1]), LOW)
    highest = ops.stop_gradient(ops.max(scores, axis=-1, keepdims=True))
    weights = zero_outside(ops.exp(scores - highest), seen)
    total = ops.sum(weights * count[..., None, :], axis=-1, keepdims=True)
    return weights / ops.where(total > 0, total, 1)  # a maximum would halve its gradient at a total of just 1


def _tokens_of(ids, documents):
    """Which tokens are of each document: `[b, g, c]`, `[b, g, p]` -> `[b, g, p, c]`; none of document 0."""
    same = ids[:, :, None] == documents[..., None]
    return ops.logical_and(same, documents[..., None] > 0)


def _mean(x, part, count):
    """`[b, g, c, s]` over the tokens of each part `[b, g, p, c]`: `[b, g, p, s]`, 0 of none."""
    x = zero_outside(ops.cast(x, count.dtype)[:, :, None], part[..., None])
    return ops.sum(x, axis=3) / ops.maximum(count, 1)[..., None]


def _flat(x, axis):
    """Joins two axes: `[b, g, p, ...]` -> `[b, g p, ...]`."""
    shape = ops.shape(x)
    return ops.reshape(x, (*shape[:axis], -1, *shape[axis + 2 :]))
