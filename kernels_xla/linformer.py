"""Softmax attention to keys and values that a learned matrix mixes from all positions.

Source: Wang et al., "Linformer", arXiv:2006.04768, equation 7. Keys and values share one matrix a head.
"""

from keras import ops

from kernels_xla.common.landmarks import real
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.softmax_attention import attend


def linformer_attention(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, *, padding_mask: Tensor | None = None
) -> Tensor:
    """Softmax(q (E k)^T / sqrt(s)) (E v), for each head.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      projection: E, `[h, r, m]`, with m >= n. A text of n tokens takes the first n columns.
      padding_mask: `[b, n]`, True at real tokens. Keys and values at padding are set to zero before mixing.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n r h (s + e)) multiply-adds, O(n r h) memory: linear in n.

    Precision:
      As in `softmax_attention`. The mixed keys and values are in the dtype of the inputs.
    """
    q, k, v = (real(x, padding_mask) for x in (q, k, v))
    mixing = projection[:, :, : ops.shape(v)[1]]
    keys, values = (ops.einsum("hrn,bnhs->brhs", mixing, x) for x in (k, v))
    return real(attend(q, keys, values), padding_mask)


def linformer_attention_reference(q, k, v, projection, *, padding_mask=None):
    """Exponentials over their sum, with the mask as a factor."""
    b, n, h, _ = v.shape
    there = ops.ones((b, n), v.dtype) if padding_mask is None else ops.cast(padding_mask, v.dtype)
    there = there[:, :, None, None]
    keys, values = (ops.einsum("hrn,bnhs->brhs", projection[:, :, :n], x * there) for x in (k, v))
    scores = ops.einsum("bihs,brhs->bihr", q, keys) / q.shape[-1] ** 0.5
    weights = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True))
    return ops.einsum("bihr,brhe->bihe", weights / ops.sum(weights, axis=-1, keepdims=True), values) * there


SPEC = KernelSpec(
    name="linformer",
    fast=linformer_attention,
    reference=linformer_attention_reference,
    stream=None,
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe", "projection": "hrm"},
    flops=lambda sizes, case: 4 * sizes["b"] * sizes["n"] * sizes["r"] * sizes["h"] * (sizes["s"] + sizes["e"]),
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=("padding_mask",),
)
