"""Decoding with weighted chunks: the same function, a few tokens at a time, in a state that grows with n / c."""

from keras import ops

from kernels_xla.common import accumulate
from kernels_xla.common.chunking import fold, unfold
from kernels_xla.common.masks import attention_mask
from kernels_xla.common.streaming import (
    append,
    emptied,
    gather_tokens,
    leave_grid,
    like,
    on_grid,
    runtime_zero,
    slice_tokens,
    when_full,
)
from kernels_xla.flash import decode
from kernels_xla.flash.intra_chunk import intra_chunk_attention
from kernels_xla.flash.weighted_inter_chunk import token_weights


def initial_state(sizes, case, dtype):
    """State before the first token, with room for the chunks of `n` tokens a row. It grows with n / c.

    Returns:
      The state of `decode`. Here `sum` is the weighted sum that the open chunk reads, times the number of tokens before
      it. `sums [b, c, 2s]`: sum_q and sum_k of the open chunk, side by side; free slots are zero. Each finished chunk
      has real tokens only. It has its sum of products of keys and values in `chunks [b, n / c, s, e]`, and its mean of
      sum_k in `keys [b, n / c, s]`, float32. `closed [b]`, int32: the number of finished chunks.
    """
    b, s, e, c = (*(sizes[axis] for axis in "bse"), case["chunk_size"])
    state, chunks = decode.initial_state(sizes, case, dtype), -(-sizes["n"] // c)
    made = {"sums": ops.zeros((b, c, 2 * s), dtype), "chunks": ops.zeros((b, chunks, s, e), dtype)}
    keys = ops.zeros((b, chunks, s), state["sum"].dtype)
    return {**state, **made, "keys": keys, "closed": ops.zeros((b,), "int32")}


def state_bytes(sizes, case, itemsize):
    s, e, c = sizes["s"], sizes["e"], case["chunk_size"]
    chunks = -(-sizes["n"] // c)
    more = itemsize * (2 * c * s + chunks * s * e) + 4 * chunks * s + 4
    return decode.state_bytes(sizes, case, itemsize) + sizes["b"] * more


def extend(
    state,
    quad_q,
    quad_k,
    lin_q,
    lin_k,
    sum_q,
    sum_k,
    v,
    a=None,
    b=None,
    *,
    chunk_size,
    valid=None,
    causal=True,
    scale="normalized",
):
    """The next k tokens of each row. One token costs O(s e + c (s + e)), and one in c costs O(n / c s e) more."""
    if not causal:
        raise ValueError("flash_weighted can be streamed only if causal, got causal=False")
    if v.shape[1] == 1:
        bias = decode.precompute(state, a, b, chunk_size=chunk_size, scale=scale)
        heads = ops.concatenate([quad_q, quad_k, lin_q, lin_k, sum_q, sum_k], axis=1)
        out, state = step(state, heads, v[:, 0], bias, chunk_size=chunk_size, valid=valid, scale=scale)
        return out[:, None], flush([state], chunk_size)[0]
    valid = ops.full_like(state["position"], ops.shape(v)[1]) if valid is None else valid
    new = {"open": ops.concatenate([quad_k, lin_k, v], axis=-1), "sums": ops.concatenate([sum_q, sum_k], axis=-1)}
    return _extend_by_chunks(state, quad_q, lin_q, new, a, b, valid, scale, chunk_size)


def step(state, heads, v, bias, *, chunk_size, valid=None, scale="normalized"):
    """One token of each row. Chunks that it fills stay open: call `flush` before the next token.

    Like `decode.step`, with `heads [b, 6, s]`: quad_q, quad_k, lin_q, lin_k, sum_q and sum_k.
    """
    new = ops.reshape(heads[:, 4:], (ops.shape(heads)[0], 1, -1))
    sums = append(state["sums"], new, state["position"] % chunk_size, valid)
    out, state = decode.step(state, heads[:, :4], v, bias, chunk_size=chunk_size, valid=valid, scale=scale)
    return out, {**state, "sums": sums}


def flush(states, chunk_size):
    """Keeps the chunks that a `step` filled and computes the next ones' sums. A second call changes nothing.

    Args:
      states: The states of the layers of one model, at the same positions.
      chunk_size: c.

    Returns:
      The states, in the same order.
    """
    full = states[0]["position"] // chunk_size > states[0]["closed"]
    return list(when_full(full, lambda full, *states: tuple(_closed(full, state) for state in states), *states))


def _closed(full, state):
    """The state after the open chunks of the rows that are `full` are closed."""
    s, chunk, written = state["sum"].shape[1], state["open"], ops.cast(full, "int32")
    q_mean, k_mean = _means(state["sums"][:, None], state["keys"].dtype)
    summary = accumulate.einsum("bjs,bje->bse", chunk[:, :, s : 2 * s], chunk[:, :, 2 * s :])
    new = {"chunks": summary[:, None], "keys": k_mean}
    kept = {name: append(state[name], x, state["closed"], written) for name, x in new.items()}
    closed = state["closed"] + written
    total = _read(kept, q_mean, closed[:, None], chunk.shape[1])[:, 0]
    chunk, sums = emptied(full, chunk, state["sums"])
    kept |= {"sum": ops.where(like(full, total), total, state["sum"]), "open": chunk, "sums": sums}
    return {**state, **kept, "closed": closed}


def _means(sums, dtype):
    """Means of sum_q and sum_k over full chunks, side by side in `[b, g, c, 2s]`: two `[b, g, s]`."""
    return ops.split(ops.mean(ops.cast(sums, dtype), axis=2), 2, axis=-1)


def _read(kept, q_mean, closed, c):
    """The weighted sum over the chunks before, times the number of their tokens: `[b, g, s, e]`, as `sum` of the state.

    Args:
      kept: The `chunks` and `keys` of the state.
      q_mean: The mean of sum_q over the chunk before, `[b, g, s]`.
      closed: Number of chunks before, int32 `[b, g]`.
      c: Tokens of a chunk.
    """
    seen = ops.arange(kept["keys"].shape[1], dtype="int32") < closed[..., None]  # [b, g, m]
    count = ops.full((1, 1), c, q_mean.dtype)
    weights = token_weights(q_mean, kept["keys"], count, seen) * ops.cast(c * closed, q_mean.dtype)[..., None]
    return accumulate.einsum("bgm,bmse->bgse", ops.cast(weights, kept["chunks"].dtype), kept["chunks"])


def _extend_by_chunks(state, quad_q, lin_q, new, a, b, valid, scale, c):
    """Places each row's open chunk and new tokens on the row's own chunk grid, and runs the parallel form there."""
    position, tokens, s = state["position"], ops.shape(new["open"])[1], lin_q.shape[-1]
    fill, until, own = position % c, position % c + valid, position // c
    laid = {name: on_grid(state[name], x, fill, valid) for name, x in new.items()}
    slots = ops.arange(ops.shape(laid["open"])[1], dtype="int32")
    arrived = slots - fill[:, None]  # [b, m]
    q_near, q_far = (fold(gather_tokens(q, arrived), c) for q in (quad_q, lin_q))
    chunks, at = fold(laid["open"], c), ops.arange(c, dtype="int32")
    k_near, k_far, v = (chunks[..., part] for part in (slice(s), slice(s, 2 * s), slice(2 * s, None)))
    intra = intra_chunk_attention(
        q_near, k_near, v, a, b, attention_mask(None, None, at, at, causal=True), scale, runtime_zero(position)
    )

    # Results for chunks that are not full are neither kept nor read.
    q_mean, k_mean = _means(fold(laid["sums"], c), state["keys"].dtype)
    kept = {"chunks": ops.einsum("bgjs,bgje->bgse", k_far, v), "keys": k_mean}
    kept = {name: append(state[name], x, own, until // c) for name, x in kept.items()}
    before = own[:, None] + slots[::c] // c  # [b, g]
    sums = ops.concatenate([state["sum"][:, None], _read(kept, q_mean, before + 1, c)], axis=1)  # [b, g + 1, s, e]
    mean = sums[:, :-1] / ops.cast(ops.maximum(c * before, 1), sums.dtype)[..., None, None]
    inter = ops.einsum("bgis,bgse->bgie", q_far, ops.cast(mean, q_far.dtype))
    out = slice_tokens(unfold(intra + inter, ops.shape(slots)[0]), fill, tokens)
    left = {name: leave_grid(x, until, c) for name, x in laid.items()}
    total = gather_tokens(sums, (until // c)[:, None])[:, 0]
    return out, {**kept, **left, "sum": total, "closed": own + until // c, "position": position + valid}
