"""Decoding with mixed chunk attention: the same function, a few tokens at a time, in constant state."""

import functools
import math

from keras import ops

from kernels_xla.common import accumulate, nvidia
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

FEW = 8  # rows; a larger batch closes up to 1 in FEW of its rows one by one, and does not split sums into parts
PARTS = 16  # parts into which the sum of a few rows is split, to run side by side
MANY = 8  # pieces; with more, sums of two lengths run one after the other


def initial_state(sizes, case, dtype):
    """State before the first token: constant in n.

    Returns:
      `sum [b, s, e]` over finished chunks, float32. `open [b, c, 2s + e]`: quad_k, lin_k and v of the open chunk, side
      by side in `dtype`, so that a token is one write; free slots are zero. `position [b]`, int32: tokens so far. If
      `overlapping`, `open` is `[b, 2c, 2s + e]` and starts with the chunk before. `closed [b]`, int32, then counts the
      chunks in the sum. A case without one of the two sums keeps nothing for it.
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
    """The number of slots, and of numbers in a slot: a key for each sum in use, and a value."""
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
    chunk_divisor=False,
):
    """The next k tokens of each row. One token costs O(s e + m (s + e)); more tokens take the chunk-parallel form."""
    if not causal:
        raise ValueError("flash can be streamed only if causal, got causal=False")
    if overlapping != ("closed" in state):
        raise ValueError(f"flash needs a state made with overlapping={overlapping}, got one with {not overlapping}")
    if v.shape[1] == 1:
        bias = None if quad_q is None else precompute(state, a, b, chunk_size=chunk_size, scale=scale)
        heads = ops.concatenate([x for x in (quad_q, quad_k, lin_q, lin_k) if x is not None], axis=1)
        case = {"chunk_size": chunk_size, "scale": scale, "chunk_divisor": chunk_divisor}
        out, state = step(state, heads, v[:, 0], bias, **case, valid=valid)
        return out[:, None], flush([state], chunk_size)[0]
    valid = ops.full_like(state["position"], ops.shape(v)[1]) if valid is None else valid
    new = ops.concatenate([x for x in (quad_k, lin_k, v) if x is not None], axis=-1)
    divisor = chunk_size if chunk_divisor else None
    return _extend_by_chunks(state, quad_q, lin_q, new, a, b, valid, scale, chunk_size, divisor)


def precompute(state, a, b, *, chunk_size, scale="normalized"):
    """The bias that each distance adds to a score. It depends only on weights, so a decoding loop computes it once.

    Returns:
      `[m + c - 1]`, float32, for the distances m - 1 down to 1 - c, with m slots in the buffer. Negative distances get
      minus infinity, so that later slots have no weight, whatever their score.
    """
    slots = state["open"].shape[1]
    if a is None:
        behind = ops.zeros((slots,), "float32")
    else:
        _, added = factors(1, slots, scale)
        behind = added * bias_by_distance(a, b, slots, runtime_zero(state["position"]))
    return ops.concatenate([ops.flip(behind), ops.full((chunk_size - 1,), -math.inf, behind.dtype)])


def step(state, heads, v, bias, *, chunk_size, valid=None, scale="normalized", chunk_divisor=False):
    """One token of each row. Chunks that it fills stay open: call `flush` before the next token.

    On an accelerator it reads the state once, the open chunk only up to the new token, and writes one token of it.
    Products of one query with many keys are sums in XLA, which fuses them with their neighbours.

    Args:
      state: A state from `initial_state` without a full chunk.
      heads: quad_q, quad_k, lin_q and lin_k of the token, `[b, 4, s]`; `[b, 2, s]` if one sum is left out.
      v: `[b, e]`.
      bias: From `precompute`; None without the first sum.
      chunk_size: c.
      valid: int32 `[b]`, 1 at rows whose token is real; None if all are.
      scale: See `mixed_chunk_attention`.
      chunk_divisor: As `scale`.

    Returns:
      `[b, e]`, and the state.
    """
    (h, s), slots, position = heads.shape[1:], state["open"].shape[1], state["position"]
    dtype, fill = sum_dtype(state["open"]), _fill(position, chunk_size)
    one, tokens = ops.ones(ops.shape(fill), dtype), ops.cast(ops.maximum(position - fill, 1), dtype)
    tokens = one * chunk_size if chunk_divisor else tokens
    content, _ = factors(s, slots, scale)
    factor = ([] if bias is None else [content * one, one]) + ([1 / tokens, one] if "sum" in state else [])
    # All heads at once, because each product is a kernel of its own.
    heads = ops.cast(heads, dtype) * ops.stack(factor, axis=1)[:, :, None]

    kept = (*(heads[:, i] for i in range(1, h, 2)), v)
    new = ops.concatenate([ops.cast(x, state["open"].dtype) for x in kept], axis=-1)
    new = new if valid is None else zero_outside(new, (valid > 0)[:, None])  # the slot is zero already
    at = fill + (slots - chunk_size)
    chunk, read = put(state["open"], new, at), []
    if bias is not None:
        scores = ops.sum(heads[:, :1] * ops.cast(chunk[:, :, :s], dtype), axis=-1)  # [b, m]
        scores = scores + ops.cast(_from(bias, chunk_size - 1 - fill, slots), dtype)
        read.append((ops.square(ops.relu(scores)), _up_to(chunk, at), h // 2 * s))
    if "sum" in state:
        read.append((heads[:, -2], state["sum"], 0))
    position = position + (1 if valid is None else valid)
    return ops.cast(_weighted_sum(read), v.dtype), {**state, "open": chunk, "position": position}


def _fill(position, c):
    """Tokens in the open chunk. If c is a power of 2, it is a bit mask, which XLA recomputes wherever it is needed."""
    return ops.bitwise_and(position, c - 1) if c & (c - 1) == 0 and not on_lite() else position % c


def _from(table, start, length):
    """`length` numbers of a table, from `start` on for each row: `[m]`, int32 `[b]` -> `[b, length]`."""
    # No slice: TensorFlow would compile it anew for each start.
    return ops.take(table, start[:, None] + ops.arange(length, dtype="int32"), axis=0)


def _up_to(chunk, fill):
    """`[b, c, w]` with slot `fill [b]` in place of each later slot. That slot is in the cache: half the reads."""
    b, c, width = chunk.shape
    if b is None or b < FEW or not nvidia.xla_compiles():  # there is enough bandwidth, or a copy would cost more
        return chunk
    slots = ops.minimum(ops.arange(c, dtype="int32")[None], fill[:, None]) + c * ops.arange(b, dtype="int32")[:, None]
    # XLA reads several numbers at once only with a single index over rows and slots.
    return ops.reshape(ops.take(ops.reshape(chunk, (b * c, width)), slots, axis=0), (b, c, width))


def _weighted_sum(read):
    """The sum over (w `[b, m]`, x `[b, m, . + e]`, first) of sum over m of w x, from column `first` on: `[b, e]`.

    Each has its own m. In XLA it is one pass: pieces of a common length are added before the sum over that length.
    """
    if not nvidia.xla_compiles():  # a slice would be a copy
        return sum(accumulate.weighted_sum(w, x)[:, first:] for w, x, first in read)
    pairs = [(w, x[:, :, first:]) for w, x, first in read]
    length = math.gcd(*(w.shape[1] for w, _ in pairs))
    if sum(w.shape[1] for w, _ in pairs) > MANY * length:
        return sum(accumulate.weighted_sum(w, x) for w, x in pairs)
    pieces = [(w, x, at) for w, x in pairs for at in range(0, w.shape[1], length)]
    terms = sum(w[:, at : at + length, None] * ops.cast(x[:, at : at + length], w.dtype) for w, x, at in pieces)
    b, _, e = terms.shape
    if b is None or b >= FEW or length % PARTS:
        return ops.sum(terms, axis=1)
    parts = ops.sum(ops.reshape(terms, (b, PARTS, length // PARTS, e)), axis=2)  # one row alone cannot fill a GPU
    return sum(parts[:, i] for i in range(PARTS))


def flush(states, chunk_size):
    """Adds the chunks that a `step` filled to the sums and empties them. A second call changes nothing.

    A row fills a chunk every c steps, and its sum is rewritten only then. The work is a loop that mostly runs no pass.
    All layers share one loop, because on a GPU the condition of each loop waits for the host.

    Args:
      states: The states of the layers of one model, at the same positions.
      chunk_size: c.

    Returns:
      The states, in the same order.
    """
    position = states[0]["position"]
    full = ops.logical_and(_fill(position, chunk_size) == 0, position > 0)  # an emptied chunk adds zero
    if "closed" in states[0]:  # here a second close would drop the chunk before
        full = ops.logical_and(full, states[0]["closed"] * chunk_size < position)
    kept = [{name: x for name, x in state.items() if name != "position"} for state in states]
    few = (full.shape[0] or 0) // FEW
    close_all, close_one = (functools.partial(f, chunk_size) for f in (_close_all, _close_one))
    full, kept = ops.while_loop(lambda full, kept: ops.sum(ops.cast(full, "int32")) > few, close_all, (full, kept))
    if few:
        _, kept = ops.while_loop(lambda full, kept: ops.any(full), close_one, (full, kept))
    return [{**state, **closed} for state, closed in zip(states, kept, strict=True)]


def _close_all(c, full, kept):
    """Closes the chunks of all rows where `full` holds, at once."""
    closed = [
        {name: ops.where(like(full, x), x, state[name]) for name, x in _closed(c, state).items()} for state in kept
    ]
    return ops.zeros_like(full), closed


def _close_one(c, full, kept):
    """Closes the chunk of the first row where `full` holds."""
    row = ops.argmax(ops.cast(full, "int32"))[None]
    set_row = lambda x, new: ops.scatter_update(x, ops.cast(row, "int32")[:, None], new)  # noqa: E731
    closed = []
    for state in kept:
        one = _closed(c, {name: ops.take(x, row, axis=0) for name, x in state.items()})
        closed.append({name: set_row(x, one[name]) for name, x in state.items()})
    return set_row(full, ops.zeros((1,), "bool")), closed


def _closed(c, state):
    """The state of rows with a full open chunk, after it is closed."""
    chunk = state["open"]
    closed = {"open": ops.concatenate([chunk[:, c:], ops.zeros_like(chunk[:, :c])], axis=1)}
    if "sum" in state:
        closed["sum"] = state["sum"] + _summary(state["sum"], chunk[:, -c:])
    if "closed" in state:
        closed["closed"] = state["closed"] + 1
    return closed


def _summary(total, chunk):
    """One matrix for each full chunk, from lin_k and v: `[b, c, . + s + e]` -> `[b, s, e]`, in the dtype of `total`."""
    s, e = total.shape[1:]
    return accumulate.einsum("bjs,bje->bse", chunk[:, :, -s - e : -e], chunk[:, :, -e:])


def _extend_by_chunks(state, quad_q, lin_q, new, a, b, valid, scale, c, divisor):
    """Places each row's open chunk and new tokens on the row's own chunk grid, and runs the parallel form there."""
    position, tokens = state["position"], ops.shape(new)[1]
    fill = position % c
    laid = on_grid(state["open"][:, -c:], new, fill, valid)
    arrived = ops.arange(ops.shape(laid)[1], dtype="int32")[None] - fill[:, None]  # [b, m]
    q1, q2 = (None if q is None else fold(gather_tokens(q, arrived), c) for q in (quad_q, lin_q))
    intra = None if q1 is None else _intra_chunk(state, q1, fold(laid, c), a, b, scale)
    inter, kept = (None, {}) if q2 is None else _inter_chunk(state, q2, fold(laid, c), fill, valid, divisor)
    out = intra if inter is None else inter if intra is None else intra + inter
    out = slice_tokens(unfold(out, ops.shape(laid)[1]), fill, tokens)
    return out, {**kept, **_left(state, laid, fill + valid, c), "position": position + valid}


def _intra_chunk(state, q, grid, a, b, scale):
    """The first sum, for queries `[b, g, c, s]` and the kept numbers of tokens, `[b, g, c, w]`: `[b, g, c, e]`."""
    c, s = q.shape[2:]
    grid = with_previous(grid, state["open"][:, :c]) if "closed" in state else grid
    at = ops.arange(grid.shape[2], dtype="int32")
    keys = 2 * s if "sum" in state else s
    seen = attention_mask(None, None, at[-c:], at, causal=True)
    return intra_chunk_attention(q, grid[..., :s], grid[..., keys:], a, b, seen, scale, runtime_zero(state["position"]))


def _inter_chunk(state, q, grid, fill, valid, divisor):
    """The second sum, for the same arguments as `_intra_chunk`, and the new `sum` of the state."""
    (s, e), c = state["sum"].shape[1:], q.shape[2]
    chunks = ops.arange(ops.shape(grid)[1], dtype="int32")[None]  # [1, g]
    summaries = accumulate.einsum("bgjs,bgje->bgse", grid[..., -s - e : -e], grid[..., -e:])
    before = state["sum"][:, None] + sum_of_earlier(summaries)
    tokens = (state["position"] - fill)[:, None] + c * chunks
    tokens = tokens if divisor is None else ops.full_like(tokens, divisor)
    mean = before / ops.cast(ops.maximum(tokens, 1), before.dtype)[..., None, None]
    closed = chunks < ((fill + valid) // c)[:, None]  # [b, g]
    total = state["sum"] + ops.sum(zero_outside(summaries, closed[..., None, None]), axis=1)
    return ops.einsum("bgis,bgse->bgie", q, ops.cast(mean, q.dtype)), {"sum": total}


def _left(state, laid, filled, c):
    """The buffer after `filled[b]` slots of a grid `[b, m, w]` from `on_grid`, and `closed` if the state has it."""
    chunk = leave_grid(laid, filled, c)
    if "closed" not in state:
        return {"open": chunk}
    before = slice_tokens(ops.concatenate([state["open"][:, :c], laid], axis=1), filled - filled % c, c)
    return {"open": ops.concatenate([before, chunk], axis=1), "closed": state["closed"] + filled // c}
