"""FLASH's mixed chunk attention with weighted chunks: scores between the means of chunks are their weights.

Source: Hua et al., "Transformer Quality in Linear Time", arXiv:2202.10447, Appendix A. It says in words that such
scores would weigh chunks, and that the state then grows with the number of chunks. The formula is our definition.
"""

from keras import ops

from kernels_xla.common.chunking import fold, unfold
from kernels_xla.common.joint_softmax import LOW
from kernels_xla.common.masks import documents, zero_outside
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.flash import attention
from kernels_xla.flash.attention import Scale, mixed_chunk_attention, mixed_chunk_attention_reference
from kernels_xla.flash.weighted_decode import extend, initial_state, state_bytes
from kernels_xla.flash.weighted_inter_chunk import weighted_inter_chunk_attention


def weighted_mixed_chunk_attention(
    quad_q: Tensor,
    quad_k: Tensor,
    lin_q: Tensor,
    lin_k: Tensor,
    sum_q: Tensor,
    sum_k: Tensor,
    v: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    chunk_size: int,
    causal: bool = False,
    scale: Scale = "normalized",
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
) -> Tensor:
    """Adds squared-ReLU attention within each chunk to weighted linear attention over chunks.

    The sum inside chunks is the first sum of `mixed_chunk_attention`. For the second, let N_h be the number of real
    tokens in chunk h, and kbar_h the mean of their sum_k. Position i of chunk g receives

        sum over the visible chunks h:  A[g, h] / N_h  sum over j of h: (lin_q[i] . lin_k[j]) v[j]
        A[g, :] = softmax over h of (qbar_g . kbar_h / sqrt(s) + log N_h)

    If `causal`, the chunks before g are visible, and qbar_g is the mean of sum_q over the chunk just before g, which is
    finished. Otherwise all chunks are visible, and qbar_g is the mean over g itself. A mean over no token is 0. If all
    scores are 0, all tokens have the same weight, which is mixed chunk attention. A causal row depends on no length.
    Both sums and all means stay inside the document of i.

    Args:
      quad_q: Queries of the first sum, `[b, n, s]`.
      quad_k: Keys of the first sum, `[b, n, s]`.
      lin_q: Queries of the second sum, `[b, n, s]`.
      lin_k: Keys of the second sum, `[b, n, s]`.
      sum_q: Queries of the scores of chunks, `[b, n, s]`.
      sum_k: Keys of the scores of chunks, `[b, n, s]`.
      v: Values, `[b, n, e]`.
      a: Left half of the relative bias, `[r]`; None for no bias.
      b: Right half, `[r]`.
      chunk_size: c, in tokens. Part of the model: changing it changes the function, not just its speed.
      causal: Whether position i may depend only on positions <= i.
      scale: As in `mixed_chunk_attention`.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; each document is one run. A document that starts on a multiple of c gets
        exactly the same result as alone. The grid cuts the chunks of any other document.
      offset: As in `mixed_chunk_attention`.

    Returns:
      `[b, n, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      As `mixed_chunk_attention`, plus O((n / c)^2 s e) multiply-adds. The linear part is larger up to n of about c^2,
      65,536 for chunks of 256. Packed rows that are not causal have two sums a chunk.

    Precision:
      Means, scores and softmax are float32. Products are in the dtype of the inputs.
    """
    n, ids = ops.shape(v)[1], documents(padding_mask, segment_ids)
    masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "offset": offset}
    options = {"chunk_size": chunk_size, "causal": causal, "scale": scale}
    inside = mixed_chunk_attention(quad_q, quad_k, None, None, v, a, b, **options, **masks)
    v = v if ids is None else zero_outside(v, (ids > 0)[..., None])
    grid = fold(ops.ones((1, n), "int32") if ids is None else ids, chunk_size)  # 0 where zeros fill the last chunk
    heads = (fold(x, chunk_size) for x in (lin_q, lin_k, v, sum_q, sum_k))
    out = inside + unfold(weighted_inter_chunk_attention(*heads, grid, segment_ids is not None, causal), n)
    return out if ids is None else zero_outside(out, (ids > 0)[..., None])


def weighted_mixed_chunk_attention_reference(
    quad_q,
    quad_k,
    lin_q,
    lin_k,
    sum_q,
    sum_k,
    v,
    a=None,
    b=None,
    *,
    chunk_size,
    causal=False,
    scale="normalized",
    padding_mask=None,
    segment_ids=None,
):
    """The second sum as one softmax over the visible tokens. Each token has the score of its chunk's mean."""
    masks = {"padding_mask": padding_mask, "segment_ids": segment_ids}
    options = {"chunk_size": chunk_size, "causal": causal, "scale": scale}
    inside = mixed_chunk_attention_reference(quad_q, quad_k, None, None, v, a, b, **options, **masks)
    n, ids = v.shape[1], documents(**masks)
    ids = ops.ones((1, n), "int32") if ids is None else ids
    document = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)  # [b, i, j]
    chunk = ops.arange(n, dtype="int32") // chunk_size
    behind = chunk[:, None] - chunk
    seen = document & (behind > 0) if causal else document
    q_mean = _mean(sum_q, document & (behind == (1 if causal else 0)))
    scores = ops.einsum("bis,bjs->bij", q_mean, _mean(sum_k, document & (behind == 0))) / sum_q.shape[-1] ** 0.5
    scores = ops.where(seen, scores, ops.cast(LOW, v.dtype))
    shares = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True)) * ops.cast(seen, v.dtype)
    total = ops.sum(shares, axis=-1, keepdims=True)
    shares = shares / ops.where(total > 0, total, ops.ones_like(total))
    return inside + ops.einsum("bij,bje->bie", shares * ops.einsum("bis,bjs->bij", lin_q, lin_k), v)


def _mean(x, of):
    """The mean of x `[b, j, s]` over the tokens `of [b, i, j]` of each token i: `[b, i, s]`."""
    of = ops.cast(of, x.dtype)
    return ops.matmul(of, x) / ops.maximum(ops.sum(of, axis=-1, keepdims=True), 1)


def _flops(sizes, case):
    b, n, s, e, c = (*(sizes[axis] for axis in "bnse"), case["chunk_size"])
    pairs_times_two = (1 if case["causal"] else 2) * (-(-n // c)) ** 2  # of chunks
    return attention.SPEC.flops(sizes, case) + b * pairs_times_two * s * (e + 1)


SPEC = KernelSpec(
    name="flash_weighted",
    fast=weighted_mixed_chunk_attention,
    reference=weighted_mixed_chunk_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={
        **dict.fromkeys(("quad_q", "quad_k", "lin_q", "lin_k", "sum_q", "sum_k"), "bns"),
        **{"v": "bne", "a": "r", "b": "r"},
    },
    flops=_flops,
    state_bytes=state_bytes,
    model_chunk=lambda case: case["chunk_size"],
)
