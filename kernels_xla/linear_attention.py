"""Linear attention: products of features instead of a softmax, so that sums over tokens can be kept.

Source: Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236. The three forms are in Buckman and Gelada,
"Linear Transformers Are Faster After All". The caller computes the features.
"""

import math
from typing import Literal

from keras import ops

from kernels_xla.common import accumulate, recurrence
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.chunking import edges, fold, sum_of_earlier, sum_of_later, unfold
from kernels_xla.common.masks import attention_mask, documents, zero_outside
from kernels_xla.common.recurrence import arrived, fitting, of_heads, over_heads
from kernels_xla.common.spec import KernelSpec, Stream, Tensor

LEAST = 1e-6  # lower clamp of denominators, as in cosFormer's code; sums of positive features are rarely below


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int = 128,
    causal: bool = False,
    normalized: bool = False,
    form: Literal["chunks", "cumsum", "matmul"] = "chunks",
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """out[i] = sum over visible j of (q[i] . k[j]) v[j], for each head. If normalized, over sum of q[i] . k[j].

    Args:
      q: Features of the queries, `[b, n, h, s]`. If normalized they must not be negative, or the denominator may cross
        zero.
      k: Features of the keys, `[b, n, h, s]`, as q.
      v: Values, `[b, n, h, e]`.
      chunk_size: c, tokens of a chunk in the form "chunks", taken in pairs. It changes only the speed.
      causal: Whether position i sees only positions j <= i.
      normalized: Whether weights are divided by their sum, clamped from below to 1e-6. A token gets zero if its
        features have zero products with all visible keys.
      form: "chunks", or one of two forms with a state for each token, from FLASH's Table 11, for comparison. "cumsum"
        takes a cumulative sum over all tokens ("Performer" there). "matmul" multiplies the mask of visible pairs with
        k v^T of all tokens ("Performer-Matmul"). It changes only speed and memory.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; a token sees its own document only.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n h (c (s + e) + s e)) multiply-adds, O(n h (c + e) + (n / c) h s e) memory: linear in n. The other
      forms take O(n h s e) memory, and "matmul" O(n^2 h s e) multiply-adds.

    Precision:
      Products are in the dtype of the inputs and accumulate in float32, also over chunks. Denominators are float32.
      "cumsum" adds in float32. It subtracts the sum before a document from the sum at its end.
    """
    n, ids = ops.shape(v)[1], documents(padding_mask, segment_ids)
    real = None if ids is None else ids > 0
    k, v = (x if real is None else zero_outside(x, of_heads(real)) for x in (k, v))
    _check_form(form)
    if form != "chunks":
        out, total = _by_tokens(q, k, v, ids, causal, normalized, form)
    elif causal or segment_ids is not None:
        c = fitting(chunk_size, v.shape[1])
        packed = None if segment_ids is None else fold(ids, c)
        parts = _by_chunks(*(fold(x, c) for x in (q, k, v)), packed, causal, normalized)
        out, total = (None if x is None else unfold(x, n) for x in parts)
    else:
        out = ops.einsum("bihs,bhse->bihe", q, ops.einsum("bjhs,bjhe->bhse", k, v))
        total = _wide_product("bihs,bhs->bih", q, _wide_sum(k, axis=1)) if normalized else None
    out = _divided(out, total)
    return out if real is None else zero_outside(out, of_heads(real))


def _wide_sum(x, axis):
    return ops.sum(ops.cast(x, sum_dtype(x)), axis=axis)


def _wide_product(equation, x, y):
    return ops.einsum(equation, ops.cast(x, y.dtype), y)


def _divided(out, total):
    """`out [..., e]` divided by `total [...]`, if given."""
    return out if total is None else ops.custom_gradient(_quotient)(out, total)


def _quotient(out, total):
    """A quotient with a gradient by hand that squares no denominator: FAVOR+ has denominators above 1e19."""
    denominator = ops.maximum(total, LEAST)[..., None]
    ratio = ops.cast(out, total.dtype) / denominator

    def gradient(dout):
        dout = ops.cast(dout, total.dtype) / denominator
        return ops.cast(dout, out.dtype), zero_outside(-ops.sum(dout * ratio, axis=-1), total > LEAST)

    return ops.cast(ratio, out.dtype), gradient


def _by_chunks(q, k, v, ids, causal, normalized, start=None):
    """Pairs inside the chunk, and sums over other chunks: all `[b, g, c, h, .]`, ids `[b, g, c]` or None.

    Returns:
      `[b, g, c, h, e]`, and the sums of the weights, `[b, g, c, h]`, or None.
    """
    at = ops.arange(q.shape[2], dtype="int32")
    seen = over_heads(attention_mask(ids, ids, at, at, causal))
    weights = zero_outside(ops.einsum("bgihs,bgjhs->bghij", q, k), seen)
    out = ops.einsum("bghij,bgjhe->bgihe", weights, v)
    total = ops.swapaxes(_wide_sum(weights, axis=-1), 2, 3) if normalized else None
    for reads, is_read, over in _other_chunks(ids, causal):
        queries, keys = zero_outside(q, reads), zero_outside(k, is_read)
        sums = over(ops.einsum("bgjhs,bgjhe->bghse", keys, v))
        sums = sums if start is None else start["sum"][:, None] + ops.cast(sums, start["sum"].dtype)
        out = out + ops.einsum("bgihs,bghse->bgihe", queries, ops.cast(sums, q.dtype))
        if normalized:
            norms = over(_wide_sum(keys, axis=2))  # [b, g, h, s]
            norms = norms if start is None else start["norm"][:, None] + norms
            total = total + _wide_product("bgihs,bghs->bgih", queries, norms)
    return out, total


def across_chunks(q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, causal: bool) -> Tensor:
    """The sum over the tokens of other chunks: only earlier chunks if `causal`, else also later ones.

    Args:
      q: `[b, g, c, h, s]`.
      k: `[b, g, c, h, s]`, zero at padding.
      v: `[b, g, c, h, e]`.
      ids: Documents, int32 `[b, g, c]`, 0 at padding; None for one document a row, which needs `causal`.
      causal: See above.

    Returns:
      `[b, g, c, h, e]`.
    """
    out = 0
    for reads, is_read, over in _other_chunks(ids, causal):
        sums = over(ops.einsum("bgjhs,bgjhe->bghse", zero_outside(k, is_read), v))
        out = out + ops.einsum("bgihs,bghse->bgihe", zero_outside(q, reads), sums)
    return out


def _other_chunks(ids, causal):
    """One or two triples: the tokens that read other chunks, the tokens that are read, and the sum over chunks.

    A document continues from the end of one chunk into the start of the next. Later chunks can therefore read only the
    last document of a chunk, and only its first document reads earlier chunks.
    """
    if ids is None:
        return [(None, None, sum_of_earlier)]
    first, last = edges(ids)
    at_first, at_last = of_heads(ids == first[..., None]), of_heads(ids == last[..., None])
    before = (at_first, at_last, lambda x: sum_of_earlier(x, first, last))
    return [before] if causal else [before, (at_last, at_first, lambda x: sum_of_later(x, first, last))]


def _check_form(form):
    if form not in ("chunks", "cumsum", "matmul"):
        raise ValueError(f"linear_attention: form must be 'chunks', 'cumsum' or 'matmul', got {form!r}")


def _by_tokens(q, k, v, ids, causal, normalized, form):
    """The result of `_by_chunks`, unfolded, from a state for each token that sums over its visible tokens."""
    known = {"cumsum": _cumulative, "matmul": _by_mask}
    at = ops.arange(ops.shape(v)[1], dtype="int32")
    seen = attention_mask(ids, ids, at, at, causal)
    over = lambda x: known[form](x, seen)  # noqa: E731
    states = over(ops.einsum("bjhs,bjhe->bjhse", k, v))
    out = ops.einsum("bihs,bihse->bihe", q, ops.cast(states, q.dtype))
    return out, ops.sum(ops.cast(q, states.dtype) * over(k), axis=-1) if normalized else None


def _by_mask(x, seen):
    """Sums `[b, n, ...]` over the visible tokens with a product; `seen [i, j]`, `[b, i, j]`, or None for all."""
    n, shape = ops.shape(x)[1], ops.shape(x)
    seen = ops.cast(ops.ones((n, n)) if seen is None else seen, x.dtype)
    batch = "b" if len(seen.shape) == 3 else ""
    flat = ops.reshape(x, (*shape[:2], math.prod(x.shape[2:])))
    return ops.reshape(accumulate.einsum(f"{batch}ij,bjf->bif", seen, flat), shape)


def _cumulative(x, seen):
    """The same by a cumulative sum: the sum up to the last visible token, minus the sum before the first."""
    x = ops.cast(x, sum_dtype(x))
    until = ops.cumsum(x, axis=1)
    if seen is None:
        return ops.broadcast_to(until[:, -1:], ops.shape(x))
    if len(seen.shape) == 2:
        return until
    first = ops.argmax(ops.cast(seen, "int32"), axis=-1)
    last = ops.shape(x)[1] - 1 - ops.argmax(ops.cast(ops.flip(seen, axis=-1), "int32"), axis=-1)
    take = lambda x, at: ops.take_along_axis(x, ops.reshape(at, (*ops.shape(at), *[1] * (len(x.shape) - 2))), 1)  # noqa: E731
    return take(until, last) - take(until - x, first)


def linear_attention_reference(
    q, k, v, *, chunk_size=None, causal=False, normalized=False, form=None, padding_mask=None, segment_ids=None
):
    """The sum over dense `[b, h, i, j]` weights.

    It departs from the listings of "Linear Transformers Are Faster After All" where they are wrong. Their double loop
    ends before j = i, although the formula includes it. Their loop over states adds k v^T but reads it as v k^T. The
    result is k (v . q), and there is no error if keys and values have the same width. Their parallel form over states
    returns `Y[:, :0]`, which is empty. None of them divides by the sum of the weights, although their experiments do.
    """
    del chunk_size, form  # any gives the same function
    n = v.shape[1]
    seen = ops.tril(ops.ones((1, n, n), "bool")) if causal else ops.ones((1, n, n), "bool")
    if (ids := documents(padding_mask, segment_ids)) is not None:
        seen = seen & (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    weights = ops.einsum("bihs,bjhs->bhij", q, k) * ops.cast(seen[:, None], v.dtype)
    if normalized:
        weights = weights / ops.maximum(ops.sum(weights, axis=-1, keepdims=True), LEAST)
    return ops.einsum("bhij,bjhe->bihe", weights, v)


def initial_state(sizes, case, dtype):
    """State before the first token, constant in n.

    Returns:
      `sum [b, h, s, e]` of k v^T, and if normalized `norm [b, h, s]` of k, both float32. `position [b]`, int32.
    """
    state = recurrence.initial_state(sizes, case, dtype)
    return {**state, "norm": ops.zeros_like(state["sum"][..., 0])} if case.get("normalized") else state


def extend(state, q, k, v, *, valid=None, chunk_size=128, causal=True, normalized=False, form="chunks"):
    """The next k tokens of each row. One token costs O(h s e); more tokens go by chunks, whatever `form` is."""
    _check_form(form)  # every form has the same stream
    if not causal:
        raise ValueError("linear_attention can be streamed only if causal, got causal=False")
    tokens, wide = ops.shape(v)[1], state["sum"].dtype
    k, v = (zero_outside(x, of_heads(arrived(tokens, valid))) for x in (k, v))
    after = {"sum": state["sum"] + ops.einsum("bjhs,bjhe->bhse", ops.cast(k, wide), ops.cast(v, wide))}
    if normalized:
        after["norm"] = state["norm"] + _wide_sum(k, axis=1)
    after["position"] = state["position"] + (tokens if valid is None else valid)
    if v.shape[1] == 1:
        out = recurrence.read(after["sum"], q, wide)
        total = _wide_product("bihs,bhs->bih", q, after["norm"]) if normalized else None
        return ops.cast(_divided(out, total), v.dtype), after
    c = fitting(chunk_size, v.shape[1])
    parts = _by_chunks(*(fold(x, c) for x in (q, k, v)), None, True, normalized, state)
    return _divided(*(None if x is None else unfold(x, tokens) for x in parts)), after


def state_bytes(sizes, case, itemsize):
    norm = 4 * sizes["b"] * sizes["h"] * sizes["s"] if case.get("normalized") else 0
    return recurrence.state_bytes(sizes, case, itemsize) + norm


def flops(sizes, case) -> int:
    """FLOPs of the state form. "matmul" adds the product of the mask with the states of all tokens."""
    seen = sizes["n"] ** 2 * (0.5 if case["causal"] else 1)
    product = round(2 * sizes["b"] * seen * sizes["h"] * sizes["s"] * sizes["e"])
    return recurrence.flops(sizes, case) + (product if case.get("form") == "matmul" else 0)


SPEC = KernelSpec(
    name="linear_attention",
    fast=linear_attention,
    reference=linear_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=flops,
    state_bytes=state_bytes,
    ranges={"q": (0.0, 2.0), "k": (0.0, 2.0)},
)
