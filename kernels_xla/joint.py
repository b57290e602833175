"""One softmax over two groups of keys: tokens of the own chunk, and summaries of other chunks.

Source: Ren et al., "Combiner: Full Attention Transformer with Sparse Computation Cost", arXiv:2107.05768.
"""

from keras import ops

from kernels_xla import accumulate
from kernels_xla.masks import keep
from kernels_xla.spec import Tensor

LOW = -1e30  # below every score, and what exp makes 0 of


def joint_attention(
    q: Tensor, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, seen: Tensor, far_seen: Tensor
) -> Tensor:
    """Softmax attention of each query to the keys of its chunk and to summaries, whose weights have one sum.

    Args:
      q: Queries, `[b, g, i, h, s]`.
      k: Keys of the chunk, `[b, g, j, h, s]`.
      v: Their values, `[b, g, j, h, e]`.
      far_k: Keys of the summaries: `[b, m, h, s]`, or `[b, m, i, h, s]` where each query has its own.
      far_v: Their values, with as many axes.
      seen: Which tokens a query sees, `[i, j]` or `[b, g, i, j]`.
      far_seen: Which summaries, of the rank of `[b, g, i, m]`, to which it is broadcast.

    Returns:
      `[b, g, i, h, e]`, in the dtype of `v`; 0 for a query that sees nothing.

    Precision:
      Scores and softmax in float32; products are in the dtype of the inputs.
    """
    column = "i" if len(far_k.shape) == 5 else ""
    q = q * ops.cast(q.shape[-1] ** -0.5, q.dtype)
    near = accumulate.einsum("bgihs,bgjhs->bghij", q, k)
    far = accumulate.einsum(f"bgihs,bm{column}hs->bghim", q, far_k)
    seen = seen if len(seen.shape) == 2 else ops.expand_dims(seen, 2)
    far_seen = ops.expand_dims(far_seen, 2)
    masked = [ops.where(seen, near, LOW), ops.where(far_seen, far, LOW)]
    weights, c = ops.softmax(ops.concatenate(masked, axis=-1), axis=-1), k.shape[2]
    near = ops.cast(keep(weights[..., :c], seen), v.dtype)
    far = ops.cast(keep(weights[..., c:], far_seen), v.dtype)
    out = ops.einsum("bghij,bgjhe->bgihe", near, v)
    return out + ops.einsum(f"bghim,bm{column}he->bgihe", far, far_v)


def joint_attention_reference(q, k, v, far_k, far_v, seen, far_seen):
    """The same over all pairs of tokens: q, k `[b, n, h, s]`, v `[b, n, h, e]`, summaries alike, masks `[b, i, j]`."""
    both = ops.concatenate([ops.einsum("bihs,bjhs->bhij", q, keys) for keys in (k, far_k)], axis=-1)
    both = both / q.shape[-1] ** 0.5
    sees = ops.cast(ops.concatenate([seen, far_seen], axis=-1)[:, None], v.dtype)
    weights = ops.exp(both - ops.max(both, axis=-1, keepdims=True)) * sees
    total = ops.sum(weights, axis=-1, keepdims=True)
    weights = weights / ops.where(total > 0, total, ops.ones_like(total))
    return ops.einsum("bhij,bjhe->bihe", weights, ops.concatenate([v, far_v], axis=1))
