"""Combiner, fixed: attention to a token's own chunk, and to one summary of each other chunk.

Source: Ren et al., "Combiner: Full Attention Transformer with Sparse Computation Cost", arXiv:2107.05768,
Combiner-Fixed. Summaries follow the authors' configuration, which pools by the maximum. Padding and documents are our
definition. So is the rule that a token which sees all chunks does not see the summary of its own. FLASH's Appendix A
describes this variant, with one vector a chunk. FLASH was measured against the other variant, `combiner_axial`.
"""

from keras import ops

from kernels_xla.common import accumulate
from kernels_xla.common.chunking import edges, fold, unfold
from kernels_xla.common.joint_softmax import LOW, joint_attention, joint_attention_reference
from kernels_xla.common.masks import attention_mask, documents, zero_outside
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.common.streaming import (
    append,
    emptied,
    filled,
    gather_tokens,
    leave_grid,
    on_grid,
    slice_tokens,
    when_full,
)


def combiner_fixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    causal: bool = False,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
) -> Tensor:
    """Softmax attention to the tokens of the own chunk and to the summaries of other chunks, under one normalizer.

    A chunk's summary is made of its tokens. The maximum is taken in each channel:

        key = max_j k[j],  value = sum over j of softmax_j(max_i q[i] . k[j] / sqrt(s)) v[j]

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      chunk_size: c, tokens of a chunk. Part of the model: changing it changes the function.
      causal: Whether position i sees only the tokens j <= i of its chunk, and only the chunks before it. Otherwise it
        sees all other chunks.
      padding_mask: `[b, n]`, True at real tokens. Summaries cover real tokens only.
      segment_ids: `[b, n]`, 0 at padding; each document is one run. A token sees its own document only. A summary
        covers the chunk's tokens of this document. A document that starts on a multiple of c gets the same result as
        alone.
      offset: As in `softmax_attention`.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n (c + n / c) h (s + e)) multiply-adds, O(n (c + n / c) h) memory: between linear and quadratic in n.

    Precision:
      As in `joint_attention`.
    """
    n, ids = ops.shape(v)[1], documents(padding_mask, segment_ids)
    if ids is None and not causal:  # hides the zeros that fill the last chunk
        ids = ops.ones(ops.shape(v)[:2], "int32")
    ids = None if ids is None else fold(ids, chunk_size)  # [b, g, c]
    at = ops.arange(chunk_size, dtype="int32") + offset
    q, k, v = (fold(x, chunk_size) for x in (q, k, v))
    far = [
        (*_summaries(_highest(q, seen), k, v, seen), _readers(ids, of, order, ops.shape(q)[1]))
        for seen, of, order in _sides(ids, causal, segment_ids is not None)
    ]
    far = [ops.concatenate(parts, axis) for parts, axis in zip(zip(*far, strict=True), (1, 1, 3), strict=True)]
    far_k, far_v, far_seen = far
    return unfold(joint_attention(q, k, v, far_k, far_v, attention_mask(ids, ids, at, at, causal), far_seen), n)


def _sides(ids, causal, packed):
    """The summaries of each chunk: their tokens, their document, and their readers as an order of (m, g).

    A document continues from the end of one chunk into the start of the next. Later chunks can therefore read only the
    last document of a chunk, and earlier chunks only its first.
    """
    before, after = ops.less, ops.greater
    if ids is None:
        return [(None, None, before)]
    first, last = edges(ids)
    if not packed:  # one document
        return [(ids > 0, last, before if causal else ops.not_equal)]
    sides = [(last, before)] if causal else [(last, before), (first, after)]
    return [(ops.logical_and(ids == of[..., None], ids > 0), of, order) for of, order in sides]


def _readers(ids, of, order, chunks):
    """Which summaries, with documents `of [b, m]`, the tokens of chunk g see: `[1, g, 1, m]` or `[b, g, c, m]`."""
    at = ops.arange(chunks, dtype="int32")
    ordered = order(at, at[:, None])[None, :, None]
    if ids is None:
        return ordered
    same = ops.logical_and(ids[..., None] == of[:, None, None], ids[..., None] > 0)
    return ops.logical_and(same, ordered)


def _highest(x, seen):
    """The maximum over the `seen` tokens of a chunk: `[b, g, c, h, s]` -> `[b, g, h, s]`."""
    return ops.max(x if seen is None else ops.where(seen[..., None, None], x, ops.cast(LOW, x.dtype)), axis=2)


def _summaries(pooled, k, v, seen):
    """Keys and values of the summaries of chunks, `[b, g, h, .]`; zero for a chunk without `seen` tokens.

    Args:
      pooled: The maximum of the queries, `[b, g, h, s]`.
      k: `[b, g, c, h, s]`.
      v: `[b, g, c, h, e]`.
      seen: `[b, g, c]`, or None for all tokens.
    """
    some = None if seen is None else ops.any(seen, axis=-1)[..., None, None]
    seen_by_heads = None if seen is None else seen[:, :, None]
    scores = accumulate.einsum(
        "bghs,bgjhs->bghj", zero_outside(pooled, some) * ops.cast(k.shape[-1] ** -0.5, k.dtype), k
    )
    scores = scores if seen is None else ops.where(seen_by_heads, scores, LOW)
    weights = ops.cast(zero_outside(ops.softmax(scores, axis=-1), seen_by_heads), v.dtype)
    return zero_outside(_highest(k, seen), some), ops.einsum("bghj,bgjhe->bghe", weights, v)


def combiner_fixed_attention_reference(q, k, v, *, chunk_size, causal=False, padding_mask=None, segment_ids=None):
    """A summary for each token, over its document's tokens in its chunk. Other chunks see the summary of the first."""
    n, ids = v.shape[1], documents(padding_mask, segment_ids)
    ids = ops.ones((1, n), "int32") if ids is None else ids
    at = ops.arange(n, dtype="int32")
    chunk = at // chunk_size
    document = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)  # [b, i, j]
    order = at[:, None] >= at if causal else at[:, None] >= 0
    inside = chunk[:, None] == chunk
    both = (document & inside)[..., None, None]  # [b, i, j, 1, 1]
    lowest = ops.cast(LOW, v.dtype)
    pooled, k_sum = (ops.max(ops.where(both, x[:, None], lowest), axis=2) for x in (q, k))
    pooled, k_sum = (zero_outside(x, (ids > 0)[..., None, None]) for x in (pooled, k_sum))
    none_before = ~ops.any(document & inside & (at[:, None] > at), axis=-1)  # [b, i]
    v_sum = joint_attention_reference(pooled, k, v, k, v, document & inside, document & (at[:, None] < 0))
    far = document & order & ~inside & none_before[:, None]
    return joint_attention_reference(q, k, v, k_sum, v_sum, document & order & inside, far)


def initial_state(sizes, case, dtype):
    """State before the first token, with room for `n` tokens a row. It keeps n / c summaries.

    Returns:
      `k [b, c, h, s]` and `v [b, c, h, e]`: the open chunk, and `pooled [b, h, s]`: the maximum of its queries; free
      slots are zero. `k_sum [b, n / c, h, s]` and `v_sum [b, n / c, h, e]`: the summaries of the finished chunks.
      `position [b]`, int32.
    """
    b, h, c = sizes["b"], sizes["h"], case["chunk_size"]
    shapes = {"k": (c, "s"), "v": (c, "e"), "k_sum": (-(-sizes["n"] // c), "s"), "v_sum": (-(-sizes["n"] // c), "e")}
    made = {name: ops.zeros((b, slots, h, sizes[axis]), dtype) for name, (slots, axis) in shapes.items()}
    return {**made, "pooled": ops.zeros((b, h, sizes["s"]), dtype), "position": ops.zeros((b,), "int32")}


def extend(state, q, k, v, *, chunk_size, valid=None, causal=True):
    """The next k tokens of each row, on the row's own grid of chunks. One token costs O(c + n / c)."""
    if not causal:
        raise ValueError("combiner_fixed can be streamed only if causal, got causal=False")
    if v.shape[1] == 1:
        return _step(state, q, k, v, chunk_size, valid)
    position, tokens, c = state["position"], ops.shape(v)[1], chunk_size
    valid = ops.full_like(position, tokens) if valid is None else valid
    fill, until = position % c, position % c + valid
    grid = {name: on_grid(state[name], new, fill, valid) for name, new in (("k", k), ("v", v))}
    slots = ops.arange(ops.shape(grid["v"])[1], dtype="int32")[None]
    arrived = slots - fill[:, None]  # [b, m]
    q, k, v = (fold(ops.cast(x, v.dtype), c) for x in (gather_tokens(q, arrived), grid["k"], grid["v"]))
    new = ops.logical_and(arrived >= 0, slots < until[:, None])
    pooled = _highest(q, fold(new, c))
    own = position // c  # the open chunk
    before = _reached(state["pooled"], fill > 0)[:, None]
    pooled = ops.concatenate([ops.maximum(pooled[:, :1], ops.cast(before, v.dtype)), pooled[:, 1:]], axis=1)
    sums = dict(zip(("k_sum", "v_sum"), _summaries(pooled, k, v, fold(slots < until[:, None], c)), strict=True))
    sums = {name: append(state[name], x, own, until // c) for name, x in sums.items()}

    at, chunks = (ops.arange(m, dtype="int32") for m in (c, state["k_sum"].shape[1]))
    far = chunks < (own[:, None] + slots[:, ::c] // c)[..., None]  # [b, g, m]
    far_kv = [ops.cast(x, v.dtype) for x in sums.values()]
    out = joint_attention(q, k, v, *far_kv, attention_mask(None, None, at, at, True), far[:, :, None])
    out = slice_tokens(unfold(out, ops.shape(slots)[1]), fill, tokens)
    left = {name: leave_grid(x, until, c) for name, x in grid.items()}
    left["pooled"] = ops.cast(
        zero_outside(gather_tokens(pooled, (until // c)[:, None])[:, 0], (until % c > 0)[:, None, None]),
        state["pooled"].dtype,
    )
    return out, {**left, **sums, "position": position + valid}


def _reached(pooled, some):
    """The maximum so far, `[b, h, s]`; below all numbers for a row without `some` token."""
    return ops.where(some[:, None, None], pooled, ops.cast(LOW, pooled.dtype))


def _step(state, q, k, v, c, valid):
    position = state["position"]
    after, fill = position + (1 if valid is None else valid), position % c
    chunk = [append(state[name], x, fill, valid) for name, x in (("k", k), ("v", v))]
    highest = ops.maximum(_reached(state["pooled"], fill > 0), ops.cast(q[:, 0], state["pooled"].dtype))
    pooled = ops.where((after > position)[:, None, None], highest, state["pooled"])

    def close(full, k, v, pooled, k_sum, v_sum):
        made = _summaries(pooled[:, None], k[:, None], v[:, None], None)
        written = ops.cast(full, "int32")
        k_sum, v_sum = (append(x, new, position // c, written) for x, new in zip((k_sum, v_sum), made, strict=True))
        return (*emptied(full, k, v, pooled), k_sum, v_sum)

    kept = when_full(filled(position, after, c), close, *chunk, pooled, state["k_sum"], state["v_sum"])
    # The token reads the cache after the write. A read before it would make XLA keep a copy. The new entry is the
    # summary of the token's own chunk, which the token does not see.
    near = ops.arange(c, dtype="int32")[None] <= fill[:, None]
    far = ops.arange(state["k_sum"].shape[1], dtype="int32")[None] < (position // c)[:, None]
    keys = [ops.cast(x, v.dtype) for x in (*(x[:, None] for x in chunk), *kept[-2:])]
    out = joint_attention(q[:, None], *keys, near[:, None, None], far[:, None, None])
    return out[:, 0], {**dict(zip(("k", "v", "pooled", "k_sum", "v_sum"), kept, strict=True)), "position": after}


def state_bytes(sizes, case, itemsize):
    s, e, c = sizes["s"], sizes["e"], case["chunk_size"]
    numbers = (c - (-sizes["n"] // c)) * (s + e) + s
    return sizes["b"] * (numbers * sizes["h"] * itemsize + 4)


def _flops(sizes, case):
    n, c = sizes["n"], case["chunk_size"]
    whole, rest = n // c, n % c
    near = whole * c * c + rest**2  # pairs of tokens
    far = n * (-(-n // c) - 1)  # pairs of tokens and other chunks
    pairs_times_two = (1 if case["causal"] else 2) * (near + far) + 2 * n  # and all tokens with their chunk's query
    return sizes["b"] * sizes["h"] * pairs_times_two * (sizes["s"] + sizes["e"])


SPEC = KernelSpec(
    name="combiner_fixed",
    fast=combiner_fixed_attention,
    reference=combiner_fixed_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=_flops,
    state_bytes=state_bytes,
    model_chunk=lambda case: case["chunk_size"],
)
