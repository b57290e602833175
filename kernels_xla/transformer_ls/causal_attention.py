"""Softmax attention to the tokens of two segments, and to a few weighted sums over each earlier segment.

Source: Zhu et al., "Long-Short Transformer", arXiv:2107.02192, sections 3.1 to 3.3, for autoregressive models. In our
form, a segment of the sums is also a segment of the window, so the window has c + 1 to 2c tokens. The authors' code has
short segments, and a window of one length for all tokens. Padding and documents are our definition.
"""

from keras import ops

from kernels_xla.common.chunking import edges, fold, unfold
from kernels_xla.common.joint_softmax import joint_attention, joint_attention_reference
from kernels_xla.common.masks import attention_mask, documents
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.common.streaming import (
    append,
    emptied,
    filled,
    gather_tokens,
    leave_grid,
    like,
    on_grid,
    slice_tokens,
    when_full,
)
from kernels_xla.transformer_ls.attention import EPSILON, sums

NEW = ("k", "v", "scores")  # kept for the tokens of the open segment
BEFORE = ("k_before", "v_before")
SUMS = ("k_sum", "v_sum")


def transformer_ls_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    k_scale: Tensor,
    k_offset: Tensor,
    v_scale: Tensor,
    v_offset: Tensor,
    *,
    chunk_size: int,
    causal: bool = True,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """out[i] = one softmax of q[i] . key / sqrt(s) over the tokens of a window and the sums before, for each head.

    A segment is c tokens. The window of token i is its own segment up to i, and the segment before. Each segment has r
    sums of its tokens, as `transformer_ls` has of a text. Token i sees the sums of all segments before its own.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      scores: Score of each token in each sum of its segment, `[b, n, h, r]`.
      k_scale: Scale of the norm of the sums' keys, `[h, s]`.
      k_offset: Offset of the norm of the sums' keys, `[h, s]`.
      v_scale: Scale of the norm of the sums' values, `[h, e]`.
      v_offset: Offset of the norm of the sums' values, `[h, e]`.
      chunk_size: c. Part of the model: changing it changes the function.
      causal: Must be True. `transformer_ls` is the form that is not causal.
      padding_mask: `[b, n]`, True at real tokens. Sums cover real tokens only.
      segment_ids: `[b, n]`, 0 at padding; each document is one run. A token sees its own document only. A sum covers
        the segment's tokens of this document. A document that starts on a multiple of c gets the same result as alone.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Raises:
      ValueError: `causal` is False.

    Cost:
      O(n (c + r n / c) h (s + e)) multiply-adds, O(n (c + r n / c) h) memory: between linear and quadratic in n.

    Precision:
      Sums are as in `transformer_ls_attention`, the rest as in `joint_attention`.
    """
    _check(causal)
    n, c, ids = ops.shape(v)[1], chunk_size, documents(padding_mask, segment_ids)
    ids = fold(ops.ones((1, n), "int32") if ids is None else ids, c)  # [b, g, c], 0 where zeros fill the last segment
    q, k, v, scores = (fold(x, c) for x in (q, k, v, scores))
    # A document continues from the end of one segment into the start of the next. Later segments can therefore read
    # only the last document of a segment.
    last = edges(ids)[1]
    of_last = ops.logical_and(ids == last[..., None], ids > 0)
    far = (_flat(x) for x in sums(scores, of_last, k, v, k_scale, k_offset, v_scale, v_offset))
    at, segment = (ops.arange(m, dtype="int32") for m in (2 * c, ops.shape(v)[1]))
    near_seen = attention_mask(ids, _window(ids), at[c:], at, True)
    far_seen = attention_mask(ids, last[:, None], segment[:, None] - 1, segment, True)  # [b, g, c, m]
    far_seen = ops.repeat(far_seen, scores.shape[-1], axis=-1)
    return unfold(joint_attention(q, _window(k), _window(v), *far, near_seen, far_seen), n)


def _check(causal):
    if not causal:
        raise ValueError("transformer_ls_causal needs causal=True, got False; transformer_ls is not causal")


def _window(x, before=None):
    """`[b, g, c, ...]` -> `[b, g, 2c, ...]`: each segment after the segment before it.

    Args:
      x: `[b, g, c, ...]`.
      before: The segment before the first, `[b, c, ...]`; None for zeros.
    """
    before = ops.zeros_like(x[:, :1]) if before is None else ops.cast(before, x.dtype)[:, None]
    return ops.concatenate([ops.concatenate([before, x[:, :-1]], axis=1), x], axis=2)


def _flat(x):
    """`[b, m, r, h, s]` -> `[b, m r, h, s]`."""
    return ops.reshape(x, (ops.shape(x)[0], -1, *ops.shape(x)[3:]))


def transformer_ls_causal_attention_reference(
    q,
    k,
    v,
    scores,
    k_scale,
    k_offset,
    v_scale,
    v_offset,
    *,
    chunk_size,
    causal=True,
    padding_mask=None,
    segment_ids=None,
):
    """All pairs with the window as a mask, and the sums over every segment's last document."""
    _check(causal)
    (b, n), ids = v.shape[:2], documents(padding_mask, segment_ids)
    ids = ops.ones((b, n), "int32") if ids is None else ids
    at = ops.arange(n, dtype="int32")
    own, segments = at // chunk_size, ops.arange(-(-n // chunk_size), dtype="int32")
    inside = (own == segments[:, None]) & (ids > 0)[:, None]  # [b, g, j]
    latest = ops.max(ops.where(inside, at, -1), axis=-1)
    last = ops.where(latest < 0, 0, ops.take_along_axis(ids, ops.maximum(latest, 0), axis=1))  # [b, g]
    member = ops.cast(inside & (ids[:, None] == last[..., None]), v.dtype)
    share = ops.exp(scores - ops.max(scores, axis=1, keepdims=True))[:, None] * member[..., None, None]
    total = ops.sum(share, axis=2, keepdims=True)
    share = share / ops.where(total > 0, total, ops.ones_like(total))  # [b, g, j, h, r]

    def summed(x, scale, offset):
        found = ops.einsum("bgjhr,bjhs->bgrhs", share, x)
        mean = ops.mean(found, axis=(3, 4), keepdims=True)
        deviation = ops.sqrt(ops.mean((found - mean) ** 2, axis=(3, 4), keepdims=True) + EPSILON)
        return ops.reshape((found - mean) / deviation * scale + offset, (b, -1, *x.shape[2:]))

    document = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)  # [b, i, j]
    near = document & (at[:, None] >= at) & (own >= own[:, None] - 1)
    far = (ids[:, :, None] == last[:, None]) & (last[:, None] > 0) & (segments < own[:, None])  # [b, i, g]
    far = ops.repeat(far, scores.shape[-1], axis=-1)
    return joint_attention_reference(q, k, v, summed(k, k_scale, k_offset), summed(v, v_scale, v_offset), near, far)


def initial_state(sizes, case, dtype):
    """State before the first token, with room for `n` tokens a row. It keeps r n / c sums, so it grows with n.

    Returns:
      `k [b, c, h, s]`, `v [b, c, h, e]` and `scores [b, c, h, r]`: the open segment; `k_before` and `v_before`: the
      segment before; free slots are zero. `k_sum [b, n / c, r, h, s]` and `v_sum [b, n / c, r, h, e]`: the sums of the
      finished segments. `position [b]`, int32.
    """
    b, h, r, c = sizes["b"], sizes["h"], sizes["r"], case["chunk_size"]
    s, e, segments = sizes["s"], sizes["e"], -(-sizes["n"] // c)
    shapes = {"k": (c, h, s), "v": (c, h, e), "scores": (c, h, r), "k_before": (c, h, s), "v_before": (c, h, e)}
    shapes |= {"k_sum": (segments, r, h, s), "v_sum": (segments, r, h, e)}
    made = {name: ops.zeros((b, *shape), dtype) for name, shape in shapes.items()}
    return {**made, "position": ops.zeros((b,), "int32")}


def extend(state, q, k, v, scores, k_scale, k_offset, v_scale, v_offset, *, chunk_size, valid=None, causal=True):
    """The next k tokens of each row, on the row's own grid of segments. One token costs O(c + r n / c)."""
    _check(causal)
    new, norm = {"k": k, "v": v, "scores": scores}, (k_scale, k_offset, v_scale, v_offset)
    if v.shape[1] == 1:
        return _step(state, q, new, norm, chunk_size, valid)
    position, tokens, c = state["position"], ops.shape(v)[1], chunk_size
    valid = ops.full_like(position, tokens) if valid is None else valid
    fill, until = position % c, position % c + valid
    grid = {name: on_grid(state[name], x, fill, valid) for name, x in new.items()}
    slots = ops.arange(ops.shape(grid["v"])[1], dtype="int32")[None]
    q = fold(ops.cast(gather_tokens(q, slots - fill[:, None]), v.dtype), c)
    k, v, scores = (fold(ops.cast(grid[name], v.dtype), c) for name in NEW)
    made = sums(scores, fold(slots < until[:, None], c), k, v, *norm)
    own = position // c  # the open segment
    cache = {name: append(state[name], x, own, until // c) for name, x in zip(SUMS, made, strict=True)}
    segment = own[:, None] + slots[:, ::c] // c  # [b, g]
    out = joint_attention(
        q,
        *(_window(x, state[name]) for name, x in zip(BEFORE, (k, v), strict=True)),
        *(_flat(ops.cast(x, v.dtype)) for x in cache.values()),
        _near(segment[..., None] * c + ops.arange(c, dtype="int32"), segment, c),
        _far(segment, cache["k_sum"])[:, :, None],
    )
    both = [ops.concatenate([state[name], grid[one]], axis=1) for name, one in zip(BEFORE, "kv", strict=True)]
    before = dict(zip(BEFORE, (slice_tokens(x, until // c * c, c) for x in both), strict=True))
    left = {name: leave_grid(x, until, c) for name, x in grid.items()}
    out = slice_tokens(unfold(out, ops.shape(slots)[1]), fill, tokens)
    return out, {**left, **before, **cache, "position": position + valid}


def _near(query, segment, c):
    """Which tokens of a window the positions `query [b, g, i]` in `segment [b, g]` see: `[b, g, i, 2c]`."""
    key = (segment[..., None] - 1) * c + ops.arange(2 * c, dtype="int32")
    return ops.logical_and(attention_mask(None, None, query, key, True), (key >= 0)[:, :, None])


def _far(segment, cache):
    """Which sums of `cache [b, m, r, h, s]` the tokens of `segment [b, g]` see: `[b, g, m r]`."""
    m, r = cache.shape[1:3]
    return ops.arange(m * r, dtype="int32") // r < segment[..., None]


def _step(state, q, new, norm, c, valid):
    position, v = state["position"], new["v"]
    after, segment = position + (1 if valid is None else valid), (position // c)[:, None]
    chunk = [append(state[name], x, position % c, valid) for name, x in new.items()]
    near = [ops.concatenate([state[name], x], axis=1)[:, None] for name, x in zip(BEFORE, chunk, strict=False)]

    def close(full, k, v, scores, k_before, v_before, *cache):
        made, written = sums(scores[:, None], None, k[:, None], v[:, None], *norm), ops.cast(full, "int32")
        before = (ops.where(like(full, x), x, old) for x, old in ((k, k_before), (v, v_before)))
        cache = (append(x, one, position // c, written) for x, one in zip(cache, made, strict=True))
        return (*emptied(full, k, v, scores), *before, *cache)

    kept = when_full(filled(position, after, c), close, *chunk, *(state[name] for name in (*BEFORE, *SUMS)))
    # The token reads the cache after the write. A read before it would make XLA keep a copy. The new entries are the
    # sums of the token's own segment, which the token does not see.
    keys = [ops.cast(x, v.dtype) for x in (*near, *map(_flat, kept[-2:]))]
    seen = _near(position[:, None, None], segment, c), _far(segment, kept[-1])[:, :, None]
    out = joint_attention(q[:, None], *keys, *seen)
    return out[:, 0], {**dict(zip((*NEW, *BEFORE, *SUMS), kept, strict=True)), "position": after}


def state_bytes(sizes, case, itemsize):
    c, r, widths = case["chunk_size"], sizes["r"], sizes["s"] + sizes["e"]
    numbers = 2 * c * widths + c * r - (-sizes["n"] // c) * r * widths
    return sizes["b"] * (numbers * sizes["h"] * itemsize + 4)


def _flops(sizes, case):
    n, c, r = sizes["n"], case["chunk_size"], sizes["r"]
    whole, rest = n // c, n % c
    before = max(n - c, 0)  # tokens that have a segment before their own
    inside = whole * c * c + rest**2  # pairs; half of them are visible
    far = r * (c * whole * (whole - 1) + 2 * rest * whole)  # twice the pairs of tokens and sums
    pairs_times_two = inside + 2 * before * c + far + 2 * n * r  # 2 n r pairs make the sums
    return sizes["b"] * sizes["h"] * pairs_times_two * (sizes["s"] + sizes["e"])


SPEC = KernelSpec(
    name="transformer_ls_causal",
    fast=transformer_ls_causal_attention,
    reference=transformer_ls_causal_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: True),
    inputs={
        "q": "bnhs", "k": "bnhs", "v": "bnhe", "scores": "bnhr",
        "k_scale": "hs", "k_offset": "hs", "v_scale": "he", "v_offset": "he",
    },
    flops=_flops,
    state_bytes=state_bytes,
    model_chunk=lambda case: case["chunk_size"],
)  # fmt: skip
