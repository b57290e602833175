"""The stream form of mixed chunk attention: the same function, a few tokens at a time, in constant state."""

import functools
import math

from keras import ops

from kernels_xla.common import accumulate
from kernels_xla.common.accelerator import on_lite
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.chunking import fold, sum_of_earlier, unfold
from kernels_xla.common.masks import attention_mask, zero_outside
from kernels_xla.common.streaming import (
    bias_by_distance,
    gather_tokens,
    leave_grid,
    like,
    on_grid,
    put,
    runtime_zero,
    slice_tokens,
)
from kernels_xla.flash.intra_chunk import factors, intra_chunk_attention, with_previous

FEW = 8  # rows; of larger batches, at most one in FEW closing a chunk close one by one, and sums are not cut in parts
PARTS = 16  # into which the sums of few rows are cut, to be made side by side
MANY = 8  # pieces, above which sums of two lengths are made one after the other


def initial_state(sizes, case, dtype):
    """State before the first token: constant in n.

    Returns:
      `sum [b, s, e]` over finished chunks, float32; `open [b, c, 2s + e]`, the open chunk's quad_k, lin_k and v side by
      side in `dtype`, so that a token is one write, zero where no token has come; `position [b]`, int32: tokens so far.
      If `overlapping`, the chunk before stands before the open one, `[b, 2c, 2s + e]`, and `closed [b]`, int32, is how
      many chunks the sum has. A case without one of the two sums keeps nothing for it.
    """
    b, s, e = (sizes[axis] for axis in "bse")
    wide = "float64" if str(dtype) == "float64" else "float32"
    state = {"open": ops.zeros((b, *_open(sizes, case)), dtype), "position": ops.zeros((b,), "int32")}
    if "lin_q" not in case:
        state["sum"] = ops.zeros((b, s, e), wide)
    if case.get("overlapping"):
        state["closed"] = ops.zeros((b,), "int32")
    return state


def _open(sizes, case):
    """Slots, and numbers in each: keys of the sums that there are, and a value."""
    keys = ("quad_q" not in case) + ("lin_q" not in case)
    return case["chunk_size"] * (2 if case.get("overlapping") else 1), keys * sizes["s"] + sizes["e"]


def state_bytes(sizes, case, itemsize):
    inter = 0 if "lin_q" in case else 4 * sizes["s"] * sizes["e"]
    counts = 8 if case.get("overlapping") else 4
    return sizes["b"] * (inter + itemsize * math.prod(_open(sizes, case)) + counts)


def extend(
    state,
    quad_q,
    quad_k,
    lin_q,
    lin_k,
    v,
    a=None,
    b=None,
    *,
    chunk_size,
    valid=None,
    causal=True,
    scale="normalized",
    overlapping=False,
):
    """The next k tokens of each row: one token costs O(s e + m (s + e)), more take the chunk-parallel form."""
    if not causal:
        raise ValueError("flash can be streamed only if causal, got causal=False")
    if overlapping != ("closed" in state):
        raise ValueError(f"flash needs a state of its own options, got one of overlapping={not overlapping}")
    if v.shape[1] == 1:
        bias = None if quad_q is None else precompute(state, a, b, chunk_size=chunk_size, scale=scale)
        heads = ops.concatenate([x for x in (quad_q, quad_k, lin_q, lin_k) if x is not None], axis=1)
        out, state = step(state, heads, v[:, 0], bias, chunk_size=chunk_size, valid=valid, scale=scale)
        return out[:, None], flush([state], chunk_size)[0]
    valid = ops.full_like(state["position"], ops.shape(v)[1]) if valid is None else valid
    new = ops.concatenate([x for x in (quad_k, lin_k, v) if x is not None], axis=-1)
    return _extend_by_chunks(state, quad_q, lin_q, new, a, b, valid, scale, chunk_size)


def precompute(state, a, b, *, chunk_size, scale="normalized"):
    """What a loop over single tokens may make once, being made of weights alone: what each distance adds to a score.

    Returns:
      `[m + c - 1]`, float32, of the distances m - 1 down to 1 - c, for the m slots of the buffer; minus infinity below
      0, so that what has not come has no weight, whatever its score.
    """
    slots = state["open"].shape[1]
    if a is None:
        behind = ops.zeros((slots,), "float32")
    else:
        _, added = factors(1, slots, scale)
        behind = added * bias_by_distance(a, b, slots, runtime_zero(state["position"]))
    return ops.concatenate([ops.flip(behind), ops.full((chunk_size - 1,), -math.inf, behind.dtype)])


def step(state, heads, v, bias, *, chunk_size, valid=None, scale="normalized"):
    """One token of each row, without closing the chunks that it fills: `flush` must follow before the next token.

    On an accelerator it reads the state once, of the open chunk what has come, and writes one token of it. Products of
    one query with many keys are written as sums: XLA fuses those with what surrounds them.

    Args:
      state: Of `initial_state`; no chunk is full.
      heads: quad_q, quad_k, lin_q and lin_k of the token, `[b, 4, s]`; or those two that there are, `[b, 2, s]`.
      v: `[b, e]`.
      bias: Of `precompute`; None without the first sum.
      chunk_size: c.
      valid: int32 `[b]`, 1 at the rows whose token is real; None for all.
      scale: See `mixed_chunk_attention`.

    Returns:
      `[b, e]`, and the state.
    """
    (h, s), slots, position = heads.shape[1:], state["open"].shape[1], state["position"]
    dtype, fill = sum_dtype(state["open"]), _fill(position, chunk_size)
    one, tokens = ops.ones(ops.shape(fill), dtype), ops.cast(ops.maximum(position - fill, 1), dtype)
    content, _ = factors(s, slots, scale)
    factor = ([] if bias is None else [content * one, one]) + ([1 / tokens, one] if "sum" in state else [])
    # Of all at once, because each product is a kernel of its own.
    heads = ops.cast(heads, dtype) * ops.stack(factor, axis=1)[:, :, None]

    kept = (*(heads[:, i] for i in range(1, h, 2)), v)
    new = ops.concatenate([ops.cast(x, state["open"].dtype) for x in kept], axis=-1)
    new = new if valid is None else zero_outside(new, (valid > 0)[:, None])  # zero is what stands there
    at = fill + (slots - chunk_size)
    chunk, read = put(state["open"], new, at), []
    if bias is not None:
        scores = ops.sum(heads[:, :1] * ops.cast(chunk[:, :, :s], dtype), axis=-1)  # [b, m]
        scores = scores + ops.cast(_from(bias, chunk_size - 1 - fill, slots), dtype)
        read.append((ops.square(ops.relu(scores)), _up_to(chunk, at)[:, :, h // 2 * s :]))
    if "sum" in state:
        read.append((heads[:, -2], state["sum"]))
    position = position + (1 if valid is None else valid)
    return ops.cast(_weighted_sum(read), v.dtype), {**state, "open": chunk, "position": position}


def _fill(position, c):
    """Tokens in the open chunk. Where a mask of bits says it, XLA makes it anew wherever it is needed."""
    return ops.bitwise_and(position, c - 1) if c & (c - 1) == 0 and not on_lite() else position % c


def _from(table, start, length):
    """`length` numbers of a table from `start` on, for each row: `[m]`, int32 `[b]` -> `[b, length]`."""
    if start.shape[0] == 1:
        return ops.slice(table, start, (length,))[None]  # in which XLA needs to read no indices
    return ops.take(table, start[:, None] + ops.arange(length, dtype="int32"), axis=0)


def _up_to(chunk, fill):
    """`[b, c, w]` with each slot after `fill` `[b]` replaced by that one, which a cache has already: half the reads."""
    b, c, width = chunk.shape
    if b is None or b < FEW:  # there is bandwidth enough
        return chunk
    slots = ops.minimum(ops.arange(c, dtype="int32")[None], fill[:, None]) + c * ops.arange(b, dtype="int32")[:, None]
    # One index over rows and slots, because XLA reads several numbers at once with that and only then.
    return ops.reshape(ops.take(ops.reshape(chunk, (b * c, width)), slots, axis=0), (b, c, width))


def _weighted_sum(pairs):
    """The sum over `attention_mask` (w `[b, m]`, x `[b, m, e]`), each of its own m, of sum over m of w x: `[b, e]`.

    In one pass: pieces of a common length are added up before the sum over it is taken.
    """
    length = math.gcd(*(w.shape[1] for w, _ in pairs))
    if sum(w.shape[1] for w, _ in pairs) > MANY * length:
        return sum(ops.sum(w[:, :, None] * ops.cast(x, w.dtype), axis=1) for w, x in pairs)
    pieces = [(w, x, at) for w, x in pairs for at in range(0, w.shape[1], length)]
    terms = sum(w[:, at : at + length, None] * ops.cast(x[:, at : at + length], w.dtype) for w, x, at in pieces)
    b, _, e = terms.shape
    if b is None or b >= FEW or length % PARTS:
        return ops.sum(terms, axis=1)
    parts = ops.sum(ops.reshape(terms, (b, PARTS, length // PARTS, e)), axis=2)  # one row alone cannot fill a GPU
    return sum(parts[:, i] for i in range(PARTS))


def flush(states, chunk_size):
    """Adds the chunks that a `step` filled to their sums, and empties them. Done twice, it is done once.

    A row fills a chunk every c steps; its sum is rewritten then and at no other time. So this is a loop over what is to
    be done, mostly nothing, and one for all layers: on a GPU each loop's condition waits for the host.

    Args:
      states: Of the layers of one model, whose positions are the same.
      chunk_size: c.

    Returns:
      The states, in their order.
    """
    position = states[0]["position"]
    full = ops.logical_and(_fill(position, chunk_size) == 0, position > 0)  # or has been, and is empty: adds zero
    if "closed" in states[0]:  # where it would be taken for the chunk before, if it were closed twice
        full = ops.logical_and(full, states[0]["closed"] * chunk_size < position)
    kept = [{name: x for name, x in state.items() if name != "position"} for state in states]
    few = (full.shape[0] or 0) // FEW
    close_all, close_one = (functools.partial(f, chunk_size) for f in (_close_all, _close_one))
    full, kept = ops.while_loop(lambda full, kept: ops.sum(ops.cast(full, "int32")) > few, close_all, (full, kept))
    if few:
        _, kept = ops.while_loop(lambda full, kept: ops.any(full), close_one, (full, kept))
    return [{**state, **closed} for state, closed in zip(states, kept, strict=True)]


def _close_all(c, full, kept):
    """All rows at once, those where `full` does not hold as they are."""
    closed = [
        {name: ops.where(like(full, x), x, state[name]) for name, x in _closed(c, state).items()} for state in kept
    ]
    return ops.zeros_like(full), closed


def _close_one(c, full, kept):
    """The first of the rows where `full` holds."""
    row = ops.argmax(ops.cast(full, "int32"))[None]
    set_row = lambda x, new: ops.scatter_update(x, ops.cast(row, "int32")[:, None], new)  # noqa: E731
    closed = []
    for state in kept:
        one = _closed(c, {name: ops.take(x, row, axis=0) for name, x in state.items()})
        closed.append({name: set_row(x, one[name]) for name, x in state.items()})
    return set_row(full, ops.zeros((1,), "bool")), closed


def _closed(c, state):
    """The state of rows whose open chunk is full, once it is closed."""
    chunk = state["open"]
    closed = {"open": ops.concatenate([chunk[:, c:], ops.zeros_like(chunk[:, :c])], axis=1)}
    if "sum" in state:
        closed["sum"] = state["sum"] + _summary(state["sum"], chunk[:, -c:])
    if "closed" in state:
        closed["closed"] = state["closed"] + 1
    return closed


def _summary(total, chunk):
    """Full chunks as one matrix each, of their lin_k and v: `[b, c, . + s + e]` -> `[b, s, e]`, as `total`."""
    s, e = total.shape[1:]
    return accumulate.einsum("bjs,bje->bse", chunk[:, :, -s - e : -e], chunk[:, :, -e:])


def _extend_by_chunks(state, quad_q, lin_q, new, a, b, valid, scale, c):
    """Lays each row's open chunk and its new tokens on the row's own chunk grid, and takes the parallel form there."""
    position, tokens = state["position"], ops.shape(new)[1]
    fill = position % c
    laid = on_grid(state["open"][:, -c:], new, fill, valid)
    arrived = ops.arange(ops.shape(laid)[1], dtype="int32")[None] - fill[:, None]  # [b, m]
    q1, q2 = (None if q is None else fold(gather_tokens(q, arrived), c) for q in (quad_q, lin_q))
    intra = None if q1 is None else _intra_chunk(state, q1, fold(laid, c), a, b, scale)
    inter, kept = (None, {}) if q2 is None else _inter_chunk(state, q2, fold(laid, c), fill, valid)
    out = intra if inter is None else inter if intra is None else intra + inter
    out = slice_tokens(unfold(out, ops.shape(laid)[1]), fill, tokens)
    return out, {**kept, **_left(state, laid, fill + valid, c), "position": position + valid}


def _intra_chunk(state, q, grid, a, b, scale):
    """The first sum, of queries `[b, g, c, s]` and what is kept of tokens, `[b, g, c, w]`: `[b, g, c, e]`."""
    c, s = q.shape[2:]
    grid = with_previous(grid, state["open"][:, :c]) if "closed" in state else grid
    at = ops.arange(grid.shape[2], dtype="int32")
    keys = 2 * s if "sum" in state else s
    seen = attention_mask(None, None, at[-c:], at, causal=True)
    return intra_chunk_attention(q, grid[..., :s], grid[..., keys:], a, b, seen, scale, runtime_zero(state["position"]))


def _inter_chunk(state, q, grid, fill, valid):
    """The second sum, of the same as `_intra_chunk`, and the sum that is kept."""
    (s, e), c = state["sum"].shape[1:], q.shape[2]
    chunks = ops.arange(ops.shape(grid)[1], dtype="int32")[None]  # [1, g]
    summaries = accumulate.einsum("bgjs,bgje->bgse", grid[..., -s - e : -e], grid[..., -e:])
    before = state["sum"][:, None] + sum_of_earlier(summaries)
    tokens = (state["position"] - fill)[:, None] + c * chunks
    mean = before / ops.cast(ops.maximum(tokens, 1), before.dtype)[..., None, None]
    closed = chunks < ((fill + valid) // c)[:, None]  # [b, g]
    total = state["sum"] + ops.sum(zero_outside(summaries, closed[..., None, None]), axis=1)
    return ops.einsum("bgis,bgse->bgie", q, ops.cast(mean, q.dtype)), {"sum": total}


def _left(state, laid, filled, c):
    """The buffer after `filled[b]` slots of what `on_grid` gave, `[b, m, w]`, and the count of chunks if it is kept."""
    chunk = leave_grid(laid, filled, c)
    if "closed" not in state:
        return {"open": chunk}
    before = slice_tokens(ops.concatenate([state["open"][:, :c], laid], axis=1), filled - filled % c, c)
    return {"open": ops.concatenate([before, chunk], axis=1), "closed": state["closed"] + filled // c}
