"""Kernelized attention: a Gaussian of the distance between query and key, without division by its sum.

Source: Chen et al., "Skyformer", arXiv:2111.00035, section 3. Skyformer approximates this kernel.
"""

from keras import ops

from kernels_xla.common import landmarks
from kernels_xla.common.masks import attention_mask, documents, zero_outside
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.softmax_attention import attention_flops


def kernelized_attention(
    q: Tensor, k: Tensor, v: Tensor, *, padding_mask: Tensor | None = None, segment_ids: Tensor | None = None
) -> Tensor:
    """out[i] = sum over visible j of exp(-|q[i] - k[j]|^2 / (2 sqrt(s))) v[j], for each head.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; a token sees its own document only.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n^2 h (s + e)) multiply-adds, O(n^2 h) memory.

    Precision:
      Weights are float32 and enter their product with `v` in its dtype. A squared distance is |q|^2 + |k|^2 - 2 q . k,
      so it loses digits if queries and keys share an offset that is large against their distances.
    """
    ids = documents(padding_mask, segment_ids)
    there = None if ids is None else ids > 0
    q, k, v = (landmarks.real(x, there) for x in (q, k, v))
    seen = attention_mask(ids, ids, None, None, causal=False)
    weights = zero_outside(landmarks.gaussian(q, k), None if seen is None else seen[:, None])
    return ops.einsum("bhij,bjhe->bihe", ops.cast(weights, v.dtype), v)


def kernelized_attention_reference(q, k, v, *, padding_mask=None, segment_ids=None):
    """The distances themselves, with the mask as a factor."""
    distances = ops.sum((q[:, :, None] - k[:, None]) ** 2, axis=-1)  # [b, i, j, h]
    weights = ops.exp(-distances / (2 * q.shape[-1] ** 0.5))
    if (ids := documents(padding_mask, segment_ids)) is not None:
        seen = (ids[:, :, None] == ids[:, None]) & (ids[:, None] > 0)
        weights = weights * ops.cast(seen[..., None], v.dtype)
    return ops.einsum("bijh,bjhe->bihe", weights, v)


SPEC = KernelSpec(
    name="kernelized_attention",
    fast=kernelized_attention,
    reference=kernelized_attention_reference,
    stream=None,
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=attention_flops,
    state_bytes=lambda sizes, case, itemsize: 0,
)
