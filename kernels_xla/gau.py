"""Squared-ReLU attention of the gated attention unit: quadratic, without softmax.

Source: Hua et al., "Transformer Quality in Linear Time", arXiv:2202.10447, section 2.2. The divisor
"length" with the scale "paper_appendix" is the paper's appendix. The default, "position", is our definition: a causal
row then depends on no length.
"""

from typing import Literal

from keras import ops

from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.masks import attention_mask, documents, strips, zero_outside
from kernels_xla.common.rotary import relative_bias
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.common.streaming import append, bias_by_distance, runtime_zero
from kernels_xla.softmax_attention import attention_flops, cache_bytes, initial_state

Scale = Literal["normalized", "paper_appendix"]
Divisor = Literal["position", "length"] | int

STRIP = 1024  # least tokens of a strip of queries: values are wide, and each strip adds a pass over them


def gau_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    causal: bool = False,
    scale: Scale = "normalized",
    divisor: Divisor = "position",
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    prefix_mask: Tensor | None = None,
    offset: int | Tensor = 0,
) -> Tensor:
    """Sums values with squared-ReLU weights: out[i] = sum over visible j of w[i, j] v[j], for each head.

        normalized:      w = relu(q[i] . k[j] / sqrt(s) + bias[i - j])^2 / N[i]
        paper_appendix:  w = relu(q[i] . k[j] / N[i] + bias[i - j])^2

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      a: Left half of the relative bias, `[r]`; None for no bias. All heads share it.
      b: Right half, `[r]`.
      causal: Whether position i sees only positions j <= i.
      scale: The place of N; see above.
      divisor: N. "position": the number of tokens that i sees. "length": the number of tokens in i's document, as in
        the paper. In a causal row "length" lets the length of the future change the past, so it cannot be streamed. An
        int: this constant.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; a token sees its own document only.
      prefix_mask: `[b, n]`, True at tokens of a prefix. All tokens of the document see them, also in causal attention.
        This is the mask of a prefix language model (UniLM, arXiv:1905.03197). None for no prefix.
      offset: Added to the positions of the bias, which does not change it. A zero that is known only at run time keeps
        the compiler from storing the bias tables in the program.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n^2 h (s + e)) multiply-adds, O(n^2 h) memory.

    Precision:
      The bias is float32. The rest is in the dtype of the inputs.
    """
    batch, n = ops.shape(q)[:2]
    at, ids = ops.arange(n, dtype="int32") + offset, documents(padding_mask, segment_ids)
    tokens = ops.broadcast_to(ops.cast(tokens_seen(at - offset, ids, causal, divisor), "float32"), (batch, n))
    bias = lambda queries, keys: None if a is None else relative_bias(a, b, queries, keys)  # noqa: E731
    if prefix_mask is not None:
        seen = _seen_with_prefix(prefix_mask, ids, at)
        tokens = ops.sum(ops.cast(seen, "float32"), axis=-1) if divisor == "position" else tokens
        return attend(q, k, v, bias(at, at), seen, ops.maximum(tokens, 1.0), scale)
    out = [
        attend(q[:, i], k[:, j], v[:, j], bias(at[i], at[j]), seen, tokens[:, i], scale)
        for i, j, seen in strips(ids, at, causal, STRIP)
    ]
    return ops.concatenate(out, axis=1)


def tokens_seen(at, ids, causal, divisor="position"):
    """N for each query, at least 1: an int, or numbers `[i]` or `[b, i]`."""
    if isinstance(divisor, int):
        return divisor
    causal = causal and divisor == "position"
    if ids is None:
        return at + 1 if causal else ops.shape(at)[0]
    return ops.maximum(ops.sum(ops.cast(attention_mask(ids, ids, at, at, causal), "float32"), axis=-1), 1.0)


def _seen_with_prefix(prefix_mask, ids, at):
    """Pairs of causal attention, and pairs whose key belongs to a prefix: `[b, i, j]`."""
    same, prefix = attention_mask(ids, ids, at, at, causal=False), ops.cast(prefix_mask, "bool")[:, None]
    return ops.logical_or(
        attention_mask(ids, ids, at, at, causal=True), prefix if same is None else ops.logical_and(prefix, same)
    )


def attend(q, k, v, bias, seen, tokens, scale):
    """Attention over the pairs `seen` with a `bias`, both `[i, j]` or `[b, i, j]`; `tokens`, N, is `[b, i]`.

    Both scales are relu(c[i] q . k + d[i] bias)^2. The factor c goes on q, which is narrower than the scores.
    """
    n = ops.cast(ops.reshape(tokens, (*ops.shape(tokens), 1)), sum_dtype(q))  # [i, 1] or [b, i, 1]
    content, added = factors(n, q.shape[-1], scale)
    q = q * ops.cast(ops.expand_dims(content, -1), q.dtype)
    # Heads come first. With an einsum, JAX leaves the layout of the result to XLA, which then transposes the others.
    q, k, v = (ops.swapaxes(x, 1, 2) for x in (q, k, v))
    scores = ops.matmul(q, ops.swapaxes(k, -1, -2))
    if bias is not None:
        scores = scores + ops.cast(_over_heads(added * bias), scores.dtype)
    weights = ops.square(ops.relu(scores))
    weights = weights if seen is None else zero_outside(weights, _over_heads(seen))
    return ops.swapaxes(ops.matmul(weights, v), 1, 2)


def factors(tokens, s, scale):
    """The factors c and d of `attend` for queries that see so many tokens, with keys of width s."""
    if scale == "normalized":
        return ops.rsqrt(tokens * s), ops.rsqrt(tokens)
    return 1.0 / tokens, ops.ones_like(tokens)


def _over_heads(x):
    """Adds an axis for heads: `[b, i, j]` -> `[b, 1, i, j]`; leaves `[i, j]` as it is."""
    return x if len(x.shape) == 2 else ops.expand_dims(x, 1)


def gau_attention_reference(
    q,
    k,
    v,
    a=None,
    b=None,
    *,
    causal=False,
    scale="normalized",
    divisor="position",
    padding_mask=None,
    segment_ids=None,
):
    """The docstring's two lines over dense `[b, h, i, j]` weights."""
    n, dtype = v.shape[1], v.dtype
    ids = documents(padding_mask, segment_ids)
    ids = ops.ones((1, n), "int32") if ids is None else ids
    document = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    seen = document & ops.tril(ops.ones((1, n, n), "bool")) if causal else document
    tokens = ops.sum(ops.cast(seen if divisor == "position" else document, dtype), axis=-1)  # [b, i]
    tokens = ops.full_like(tokens, divisor) if isinstance(divisor, int) else ops.maximum(tokens, ops.ones_like(tokens))
    tokens = tokens[:, None, :, None]

    bias = 0 if a is None else ops.cast(relative_bias(a, b, ops.arange(n), ops.arange(n)), dtype)
    scores = ops.einsum("bihs,bjhs->bhij", q, k)
    if scale == "normalized":
        weights = ops.square(ops.relu(scores / q.shape[-1] ** 0.5 + bias)) / tokens
    else:
        weights = ops.square(ops.relu(scores / tokens + bias))
    return ops.einsum("bhij,bjhe->bihe", weights * ops.cast(seen[:, None], dtype), v)


def precompute(state, a, b):
    """The bias by distance, or None. It depends only on weights, so a decoding loop computes it once."""
    return None if a is None else bias_by_distance(a, b, state["k"].shape[1], runtime_zero(state["position"]))


def extend(
    state, q, k, v, a=None, b=None, *, valid=None, causal=True, scale="normalized", divisor="position", precomputed=None
):
    """The next k tokens of each row against the cache, which must have room. `precomputed` is from `precompute`."""
    start, new = state["position"], ops.shape(q)[1]
    cache = {name: append(state[name], x, start, valid) for name, x in (("k", k), ("v", v))}
    at = start[:, None] + ops.arange(new, dtype="int32")  # [b, k]
    slots = ops.arange(cache["k"].shape[1], dtype="int32")[None] + runtime_zero(start)  # [1, m]
    tokens = at + 1 if divisor == "position" else ops.full_like(at, divisor)
    if precomputed is not None or (q.shape[1] == 1 and a is not None):
        table = precompute(state, a, b) if precomputed is None else precomputed
        bias = ops.take(table, ops.maximum(at[:, :, None] - slots[:, None], 0), axis=0)
    else:
        bias = None if a is None else relative_bias(a, b, at, slots)
    out = attend(q, cache["k"], cache["v"], bias, attention_mask(None, None, at, slots, causal), tokens, scale)
    return out, {**cache, "position": start + (new if valid is None else valid)}


SPEC = KernelSpec(
    name="gau",
    fast=gau_attention,
    reference=gau_attention_reference,
    stream=Stream(
        initial_state=initial_state,
        extend=extend,
        supports=lambda case: case["causal"] and case.get("divisor") != "length",
    ),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe", "a": "r", "b": "r"},
    flops=attention_flops,
    state_bytes=cache_bytes,
)
