"""Softmax attention through means of segments: Nystrom's method.

Source: Xiong et al., "Nystromformer", arXiv:2102.03902, equations 9 to 13, without the convolution of values.
"""

from keras import ops

from kernels_xla.common.accumulate import einsum
from kernels_xla.common.landmarks import flops, means, pseudo_inverse, real, segments
from kernels_xla.common.masks import zero_outside
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.softmax_attention import attend


def nystromformer_attention(
    q: Tensor, k: Tensor, v: Tensor, *, landmarks: int, padding_mask: Tensor | None = None
) -> Tensor:
    """F1 pinv(F2) F3 v, for each head.

    F1 = softmax(q K^T / sqrt(s)), F2 = softmax(Q K^T / sqrt(s)) and F3 = softmax(Q k^T / sqrt(s)), where the rows of Q
    and K are means of q and k over segments of the text. With one segment for each token, it equals softmax attention
    up to the error of the inverse.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      landmarks: t, the number of segments; see `kernels_xla.common.landmarks` for their borders and the inverse.
      padding_mask: `[b, n]`, True at real tokens. Means cover real tokens only.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n t h (s + e) + t^3 h) multiply-adds, O(n t h) memory: linear in n.

    Precision:
      Softmax, F2 and its inverse are float32. Other products are as in `softmax_attention`.
    """
    q, k, v = (real(x, padding_mask) for x in (q, k, v))
    member = segments(v, padding_mask, landmarks)
    queries, keys = (means(x, member) for x in (q, k))
    there = ops.any(member, axis=1)[:, None]  # [b, 1, t], segments with tokens
    scores = einsum("bihs,bjhs->bhij", queries * ops.cast(q.shape[-1] ** -0.5, q.dtype), keys)
    scores = ops.where(there[:, None], scores, ops.cast(-1e30, scores.dtype))
    middle = ops.softmax(scores, axis=-1)
    both = ops.logical_and(there, ops.swapaxes(there, 1, 2))[:, None]
    inverse = pseudo_inverse(zero_outside(middle, both))
    told = attend(queries, k, v, None if padding_mask is None else padding_mask[:, None])  # [b, t, h, e]
    told = ops.einsum("bhij,bjhe->bihe", inverse, ops.cast(told, inverse.dtype))
    return real(attend(q, keys, ops.cast(told, v.dtype), there), padding_mask)


def nystromformer_attention_reference(q, k, v, *, landmarks, padding_mask=None):
    """The three softmax matrices and the mean as a matrix, with the mask as a factor."""
    dtype, (b, n) = v.dtype, v.shape[:2]
    there = ops.ones((b, n), "int32") if padding_mask is None else ops.cast(padding_mask, "int32")
    segment = (ops.cumsum(there, axis=1) - 1) * landmarks // ops.maximum(ops.sum(there, axis=1, keepdims=True), 1)
    there = ops.cast(there, dtype)
    mean = ops.cast(segment[:, None] == ops.arange(landmarks)[:, None], dtype) * there[:, None]  # [b, t, n]
    filled = ops.minimum(ops.sum(mean, axis=-1), 1)
    mean = mean / ops.maximum(ops.sum(mean, axis=-1, keepdims=True), 1)
    queries, keys = (ops.einsum("btn,bnhs->bths", mean, x) for x in (q, k))

    def softmax(q, k, seen):
        scores = ops.einsum("bihs,bjhs->bhij", q, k) / q.shape[-1] ** 0.5
        weights = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True)) * seen[:, None, None]
        total = ops.sum(weights, axis=-1, keepdims=True)
        return weights / ops.where(total > 0, total, ops.ones_like(total))

    middle = softmax(queries, keys, filled) * filled[:, None, :, None]
    weights = softmax(q, keys, filled) @ pseudo_inverse(middle) @ softmax(queries, k, there)
    return ops.einsum("bhij,bjhe->bihe", weights, v)


SPEC = KernelSpec(
    name="nystromformer",
    fast=nystromformer_attention,
    reference=nystromformer_attention_reference,
    stream=None,
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=flops,
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=("padding_mask",),
)
