"""Squared-ReLU attention from one text to another: the gated attention unit as cross-attention.

Source: Hua et al., "Transformer Quality in Linear Time", arXiv:2202.10447, section 2.2, for the unit. No source defines
it as cross-attention, so this is our definition.
"""

from keras import ops

from kernels_xla.common.masks import zero_outside
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.gau import attend


def gau_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, *, padding_mask: Tensor | None = None, memory_mask: Tensor | None = None
) -> Tensor:
    """Sums values with squared-ReLU weights: out[i] = sum over j of relu(q[i] . k[j] / sqrt(s))^2 / N v[j].

    Each head does so. N is the number of real tokens in the row's memory. There is no relative bias, because positions
    in two texts have no distance.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys of the memory, `[b, m, h, s]`.
      v: Values of the memory, `[b, m, h, e]`.
      padding_mask: `[b, n]`, True at real queries.
      memory_mask: `[b, m]`, True at real tokens of the memory. A row without any gives 0.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n m h (s + e)) multiply-adds, O(n m h) memory.

    Precision:
      In the dtype of the inputs.
    """
    b, n, m = *ops.shape(q)[:2], ops.shape(k)[1]
    if memory_mask is None:
        seen, tokens = None, ops.full((b, n), m, "float32")
    else:
        seen = ops.broadcast_to(memory_mask[:, None], (b, n, m))
        tokens = ops.maximum(ops.sum(ops.cast(seen, "float32"), axis=-1), 1.0)
    out = attend(q, k, v, None, seen, tokens, "normalized")
    return out if padding_mask is None else zero_outside(out, padding_mask[..., None, None])


def gau_cross_attention_reference(q, k, v, *, padding_mask=None, memory_mask=None):
    """The formula over dense weights, with masks as factors."""
    b, n, h, s = q.shape
    there, real = ops.ones((b, k.shape[1]), v.dtype), ops.ones((b, n), v.dtype)
    there = there if memory_mask is None else ops.cast(memory_mask, v.dtype)
    real = real if padding_mask is None else ops.cast(padding_mask, v.dtype)
    count = ops.maximum(ops.sum(there, axis=1), 1)[:, None, None, None]
    scores = ops.einsum("bihs,bjhs->bhij", q, k) / s**0.5
    weights = ops.square(ops.maximum(scores, 0)) / count * there[:, None, None]
    return ops.einsum("bhij,bjhe->bihe", weights, v) * real[..., None, None]


SPEC = KernelSpec(
    name="gau_cross",
    fast=gau_cross_attention,
    reference=gau_cross_attention_reference,
    stream=None,
    inputs={"q": "bnhs", "k": "bmhs", "v": "bmhe"},
    flops=lambda sizes, case: 2 * sizes["b"] * sizes["n"] * sizes["m"] * sizes["h"] * (sizes["s"] + sizes["e"]),
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=("padding_mask",),
)
