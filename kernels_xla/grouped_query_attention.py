"""Softmax attention with fewer heads of keys and values than of queries.

Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", arXiv:2305.13245. With one head of
keys and values it is multi-query attention, Shazeer, arXiv:1911.02150.
"""

from collections.abc import Callable

from keras import ops

from kernels_xla import softmax_attention
from kernels_xla.common.masks import attention_mask, documents, strips
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.common.streaming import append


def grouped_query_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Softmax attention in which each head of keys and values serves a group of h heads of queries.

    out[i, k, h] = sum over visible j of softmax_j(q[i, k, h] . key[j, k] / sqrt(s)) v[j, k]

    Args:
      q: Queries, `[b, n, k, h, s]`.
      k: Keys, `[b, n, k, s]`.
      v: Values, `[b, n, k, e]`.
      causal: Whether position i sees only positions j <= i.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; a token sees its own document only.
      offset: Added to the positions that the mask compares; see `softmax_attention`.
      dropout: As in `softmax_attention`.

    Returns:
      `[b, n, k, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n^2 k h (s + e)) multiply-adds, O(n^2 k h) memory. Keys and values are not repeated.

    Precision:
      As `softmax_attention`.
    """
    at, ids = ops.arange(ops.shape(q)[1], dtype="int32") + offset, documents(padding_mask, segment_ids)
    cut = strips(ids, at, causal, softmax_attention.STRIP)
    return ops.concatenate([_attend(q[:, i], k[:, j], v[:, j], seen, dropout) for i, j, seen in cut], axis=1)


def _attend(q, k, v, seen, dropout=None):
    """The h queries of a group stand one after the other, as further queries of the one head that they share."""
    b, i, heads, group, s = ops.shape(q)
    q = ops.reshape(ops.swapaxes(q, 2, 3), (b, i * group, heads, s))
    seen = None if seen is None else ops.repeat(seen, group, axis=-2)
    out = softmax_attention.attend(q, k, v, seen, dropout)
    return ops.swapaxes(ops.reshape(out, (b, i, group, heads, v.shape[-1])), 2, 3)


def grouped_query_attention_reference(q, k, v, *, causal=False, padding_mask=None, segment_ids=None):
    """Multi-head attention with keys and values repeated for each query of a group."""
    b, n, heads, group, s = q.shape
    q = ops.reshape(q, (b, n, heads * group, s))
    k, v = (ops.repeat(x, group, axis=2) for x in (k, v))
    masks = {"causal": causal, "padding_mask": padding_mask, "segment_ids": segment_ids}
    out = softmax_attention.softmax_attention_reference(q, k, v, **masks)
    return ops.reshape(out, (b, n, heads, group, v.shape[-1]))


def initial_state(sizes, case, dtype):
    """An empty cache with room for `n` tokens a row: `k [b, n, k, s]`, `v [b, n, k, e]`, `position [b]`."""
    return softmax_attention.initial_state({**sizes, "h": sizes["k"]}, case, dtype)


def extend(state, q, k, v, *, valid=None, causal=True):
    """The next k tokens of each row against the cache, which must have room for them."""
    start, new = state["position"], ops.shape(q)[1]
    cache = {name: append(state[name], x, start, valid) for name, x in (("k", k), ("v", v))}
    at = start[:, None] + ops.arange(new, dtype="int32")
    seen = attention_mask(None, None, at, ops.arange(cache["k"].shape[1], dtype="int32")[None], causal)
    out = _attend(q, cache["k"], cache["v"], seen)
    return out, {**cache, "position": start + (new if valid is None else valid)}


SPEC = KernelSpec(
    name="grouped_query_attention",
    fast=grouped_query_attention,
    reference=grouped_query_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"q": "bnkhs", "k": "bnks", "v": "bnke"},
    flops=lambda sizes, case: sizes["k"] * softmax_attention.attention_flops(sizes, case),
    state_bytes=lambda sizes, case, itemsize: softmax_attention.cache_bytes({**sizes, "h": sizes["k"]}, case, itemsize),
)
