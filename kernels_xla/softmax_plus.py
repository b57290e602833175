"""Softmax attention whose temperature follows the number of tokens that a query sees.

Source: Su, "Entropy invariance of attention", https://kexue.fm/archives/8823; GAU-alpha's attention,
https://kexue.fm/archives/9052.
"""

import math
from collections.abc import Callable

from keras import ops

from kernels_xla import softmax_attention
from kernels_xla.common.masks import documents
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.gau import tokens_seen

LENGTH = 512  # tokens at which it is softmax attention


def softmax_plus(
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
    """out[i] = sum over visible j of softmax_j(log(N[i]) / log(512) q[i] . k[j] / sqrt(s)) v[j], for each head.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      causal: Whether position i sees only positions j <= i. N[i] is the number of tokens that i sees.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; a token sees its own document only.
      offset: Added to the positions that the mask compares; see `softmax_attention`.
      dropout: As in `softmax_attention`.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      As `softmax_attention`.

    Precision:
      As `softmax_attention`. The factor is float32, and multiplies the queries.
    """
    options = {"causal": causal, "padding_mask": padding_mask, "segment_ids": segment_ids}
    options |= {"offset": offset, "dropout": dropout}
    seen = tokens_seen(ops.arange(ops.shape(q)[1], dtype="int32"), documents(padding_mask, segment_ids), causal)
    return softmax_attention.softmax_attention(_sharpened(q, seen), k, v, **options)


def _sharpened(q, tokens):
    """Queries times log(N) / log(512), for N `[n]` or `[b, n]`, or one number for all."""
    factor = ops.log(ops.cast(tokens, "float32")) / math.log(LENGTH)
    return q * ops.cast(factor if len(factor.shape) == 0 else factor[..., None, None], q.dtype)


def softmax_plus_reference(q, k, v, *, causal=False, padding_mask=None, segment_ids=None):
    """Softmax attention of queries that are multiplied first."""
    n, ids = v.shape[1], documents(padding_mask, segment_ids)
    ids = ops.ones((1, n), "int32") if ids is None else ids
    seen = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    seen = seen & ops.tril(ops.ones((1, n, n), "bool")) if causal else seen
    tokens = ops.maximum(ops.sum(ops.cast(seen, q.dtype), axis=-1), ops.ones((1, 1), q.dtype))  # [b, i]
    q = q * (ops.log(tokens) / math.log(LENGTH))[..., None, None]
    masks = {"causal": causal, "padding_mask": padding_mask, "segment_ids": segment_ids}
    return softmax_attention.softmax_attention_reference(q, k, v, **masks)


def extend(state, q, k, v, *, valid=None, causal=True):
    """The next k tokens of each row against the cache, which must have room for them."""
    tokens = state["position"][:, None] + 1 + ops.arange(ops.shape(q)[1], dtype="int32")
    return softmax_attention.extend(state, _sharpened(q, tokens), k, v, valid=valid, causal=causal)


SPEC = KernelSpec(
    name="softmax_plus",
    fast=softmax_plus,
    reference=softmax_plus_reference,
    stream=Stream(initial_state=softmax_attention.initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=softmax_attention.attention_flops,
    state_bytes=softmax_attention.cache_bytes,
)
