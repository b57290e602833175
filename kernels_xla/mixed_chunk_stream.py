"""The stream form of mixed chunk attention: the same function, a few tokens at a time, in constant state."""

import math

from keras import ops

from kernels_xla import accumulate
from kernels_xla.accelerator import on_lite
from kernels_xla.chunking import fold, sum_of_earlier, unfold
from kernels_xla.masks import keep, pairs
from kernels_xla.rotary import relative_bias
from kernels_xla.streaming import bias_by_distance, leave_grid, on_grid, put, rows, runtime_zero

FEW = 8  # rows; of larger batches, at most one in FEW closing a chunk close one by one, and sums are not cut in parts
PARTS = 16  # into which the sums of few rows are cut, to be made side by side
MANY = 8  # pieces, above which sums of two lengths are made one after the other


def initial_state(sizes, case, dtype):
    """State before the first token: constant in n.

    Returns:
      `sum [b, s, e]` over finished chunks, float32; `open [b, c, 2s + e]`, the open chunk's k_quad, k_lin and v side by
      side in `dtype`, so that a token is one write, zero where no token has come; `position [b]`, int32: tokens so far.
    """
    b, s, e, c = sizes["b"], sizes["s"], sizes["e"], case["chunk_size"]
    wide = "float64" if str(dtype) == "float64" else "float32"
    chunks = {"sum": ops.zeros((b, s, e), wide), "open": ops.zeros((b, c, 2 * s + e), dtype)}
    return {**chunks, "position": ops.zeros((b,), "int32")}


def state_bytes(sizes, case, itemsize):
    b, s, e, c = sizes["b"], sizes["s"], sizes["e"], case["chunk_size"]
    return b * (4 * s * e + itemsize * c * (2 * s + e) + 4)


def extend(
    state, q_quad, k_quad, q_lin, k_lin, v, a=None, b=None, *, chunk_size, valid=None, causal=True, scale="normalized"
):
    """The next k tokens of each row: one token costs O(s e + c (s + e)), more take the chunk-parallel form."""
    if not causal:
        raise ValueError("mixed_chunk can be streamed only if causal, got causal=False")
    if v.shape[1] == 1:
        bias = prepare(state, a, b, chunk_size=chunk_size, scale=scale)
        heads = ops.concatenate([q_quad, k_quad, q_lin, k_lin], axis=1)
        out, state = step(state, heads, v[:, 0], bias, chunk_size=chunk_size, valid=valid, scale=scale)
        return out[:, None], close([state], chunk_size)[0]
    new = ops.concatenate([k_quad, k_lin, v], axis=-1)
    valid = ops.full_like(state["position"], ops.shape(v)[1]) if valid is None else valid
    return _extend_by_chunks(state, q_quad, q_lin, new, a, b, valid, scale, chunk_size)


def prepare(state, a, b, *, chunk_size, scale="normalized"):
    """What a loop over single tokens may make once, being made of weights alone: what each distance adds to a score.

    Returns:
      `[2c - 1]`, float32, of the distances c - 1 down to 1 - c; minus infinity below 0, so that what has not come has
      no weight, whatever its score.
    """
    if a is None:
        behind = ops.zeros((chunk_size,), "float32")
    else:
        _, added = _factors(1, chunk_size, scale)
        behind = added * bias_by_distance(a, b, chunk_size, runtime_zero(state["position"]))
    return ops.concatenate([ops.flip(behind), ops.full((chunk_size - 1,), -math.inf, behind.dtype)])


def step(state, heads, v, bias, *, chunk_size, valid=None, scale="normalized"):
    """One token of each row, without closing the chunks that it fills: `close` must follow before the next token.

    On an accelerator it reads the state once, of the open chunk what has come, and writes one token of it. Products of
    one query with many keys are written as sums: XLA fuses those with what surrounds them.

    Args:
      state: Of `initial_state`; no chunk is full.
      heads: q_quad, k_quad, q_lin and k_lin of the token, `[b, 4, s]`.
      v: `[b, e]`.
      bias: Of `prepare`.
      chunk_size: c.
      valid: int32 `[b]`, 1 at the rows whose token is real; None for all.
      scale: See `mixed_chunk_attention`.

    Returns:
      `[b, e]`, and the state.
    """
    s, position, dtype = heads.shape[-1], state["position"], state["sum"].dtype
    fill = _fill(position, chunk_size)
    one, tokens = ops.ones(ops.shape(fill), dtype), ops.cast(ops.maximum(position - fill, 1), dtype)
    content, _ = _factors(s, chunk_size, scale)
    factors = ops.stack([content * one, one, 1 / tokens, one], axis=1)  # [b, 4]
    heads = ops.cast(heads, dtype) * factors[:, :, None]  # of all at once, because each product is a kernel of its own

    new = ops.concatenate([ops.cast(x, state["open"].dtype) for x in (heads[:, 1], heads[:, 3], v)], axis=-1)
    new = new if valid is None else keep(new, (valid > 0)[:, None])  # zero is what stands there
    chunk = put(state["open"], new, fill)
    scores = ops.sum(heads[:, :1] * ops.cast(chunk[:, :, :s], dtype), axis=-1)  # [b, c]
    scores = scores + ops.cast(_from(bias, chunk_size - 1 - fill, chunk_size), dtype)
    weights = ops.square(ops.relu(scores))
    out = _weighted_sum([(weights, _up_to(chunk, fill)[:, :, 2 * s :]), (heads[:, 2], state["sum"])])
    position = position + (1 if valid is None else valid)
    return ops.cast(out, v.dtype), {"sum": state["sum"], "open": chunk, "position": position}


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
    """The sum over `pairs` (w `[b, m]`, x `[b, m, e]`), each of its own m, of sum over m of w x: `[b, e]`.

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


def close(states, chunk_size):
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
    kept = [(state["sum"], state["open"]) for state in states]
    few = (full.shape[0] or 0) // FEW
    full, kept = ops.while_loop(lambda full, kept: ops.sum(ops.cast(full, "int32")) > few, _close_all, (full, kept))
    if few:
        _, kept = ops.while_loop(lambda full, kept: ops.any(full), _close_one, (full, kept))
    return [{**state, "sum": total, "open": chunk} for state, (total, chunk) in zip(states, kept, strict=True)]


def _close_all(full, kept):
    """All rows at once, those where `full` does not hold as they are."""
    at = full[:, None, None]
    closed = [(total + keep(_summary(total, chunk), at), keep(chunk, ops.logical_not(at))) for total, chunk in kept]
    return ops.zeros_like(full), closed


def _close_one(full, kept):
    """The first of the rows where `full` holds."""
    row = ops.argmax(ops.cast(full, "int32"))[None]
    set_row = lambda x, new: ops.scatter_update(x, ops.cast(row, "int32")[:, None], new)  # noqa: E731
    closed = []
    for total, chunk in kept:
        one = ops.take(chunk, row, axis=0)
        total = set_row(total, ops.take(total, row, axis=0) + _summary(total, one))
        closed.append((total, set_row(chunk, ops.zeros_like(one))))
    return set_row(full, ops.zeros((1,), "bool")), closed


def _summary(total, chunk):
    """Full chunks as one matrix each: `[b, c, 2s + e]` -> `[b, s, e]`, for sums `total [., s, e]`."""
    s = total.shape[1]
    return accumulate.einsum("bjs,bje->bse", chunk[:, :, s : 2 * s], chunk[:, :, 2 * s :])


def _extend_by_chunks(state, q_quad, q_lin, new, a, b, valid, scale, c):
    """Lays each row's open chunk and its new tokens on the row's own chunk grid, and takes the parallel form there."""
    position, s, tokens = state["position"], q_quad.shape[-1], ops.shape(new)[1]
    fill = position % c
    laid = on_grid(state["open"], new, fill, valid)
    arrived = ops.arange(ops.shape(laid)[1], dtype="int32")[None] - fill[:, None]  # [b, m]
    q1, q2, grid = (fold(x, c) for x in (rows(q_quad, arrived), rows(q_lin, arrived), laid))
    k1, k2, v = grid[..., :s], grid[..., s : 2 * s], grid[..., 2 * s :]
    summaries = accumulate.einsum("bgjs,bgje->bgse", k2, v)
    before = state["sum"][:, None] + sum_of_earlier(summaries)
    counts = (position - fill)[:, None] + c * ops.arange(ops.shape(v)[1], dtype="int32")[None]
    out = _local(q1, k1, v, a, b, scale, runtime_zero(position)) + _read(q2, before, counts)
    out = rows(unfold(out, ops.shape(laid)[1]), fill[:, None] + ops.arange(tokens, dtype="int32")[None])
    closed = ops.arange(ops.shape(v)[1], dtype="int32")[None] < ((fill + valid) // c)[:, None]  # [b, g]
    return out, {
        "sum": state["sum"] + ops.sum(keep(summaries, closed[..., None, None]), axis=1),
        "open": leave_grid(laid, fill + valid, c),
        "position": position + valid,
    }


def _local(q, k, v, a, b, scale, zero):
    """The sum inside chunks: q, k `[b, g, c, s]`, v `[b, g, c, e]` -> `[b, g, c, e]`."""
    c, s = q.shape[2:]
    at = ops.arange(c, dtype="int32")
    content, added = _factors(s, c, scale)
    scores = ops.einsum("bgis,bgjs->bgij", q * ops.cast(content, q.dtype), k)
    if a is not None:
        scores = scores + ops.cast(added * relative_bias(a, b, at + zero, at + zero), scores.dtype)
    weights = keep(ops.square(ops.relu(scores)), pairs(None, None, at, at, causal=True))
    return ops.einsum("bgij,bgje->bgie", weights, v)


def _factors(s, c, scale):
    """Both scales are relu(content q . k + added bias)^2; on q the factor touches s numbers a token instead of c."""
    return ((s * c) ** -0.5, c**-0.5) if scale == "normalized" else (1.0 / c, 1.0)


def _read(q, sums, tokens):
    """Reads chunk sums `[b, g, s, e]`, each over `tokens` `[b, g]`, with q `[b, g, c, s]`."""
    mean = sums / ops.cast(ops.maximum(tokens, 1), sums.dtype)[..., None, None]
    return ops.einsum("bgis,bgse->bgie", q, ops.cast(mean, q.dtype))
