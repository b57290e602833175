"""Code of linear attention with and without decay: heads on chunks, and the state that passes between chunks."""

import math
from collections.abc import Callable

from keras import ops

from kernels_xla.common import accumulate
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.chunking import edges, fold, unfold
from kernels_xla.common.masks import attention_mask, documents, zero_outside
from kernels_xla.common.spec import State, Tensor
from kernels_xla.common.streaming import like

SUBCHUNK = 16  # tokens; the chunk of a short text is shortened to a multiple of this


def fitting(chunk_size: int, n: int | None) -> int:
    """The chunk size for a text of n tokens: at most n, rounded up to a multiple of `SUBCHUNK`."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    return chunk_size if n is None else min(chunk_size, max(1, -(-n // SUBCHUNK)) * SUBCHUNK)


def check_causal(name: str, causal: bool) -> None:
    """Raises a ValueError unless `causal`: a decay runs from token to token, so it needs an order."""
    if not causal:
        raise ValueError(f"{name} is causal by definition: it needs causal=True, got {causal}")


def over_heads(x: Tensor | None) -> Tensor | None:
    """Adds an axis for heads to a mask of pairs: `[b, g, i, j]` -> `[b, g, 1, i, j]`; leaves `[i, j]` as it is."""
    return x if x is None or len(x.shape) == 2 else ops.expand_dims(x, 2)


def of_heads(x: Tensor | None) -> Tensor | None:
    """Adds axes for heads and channels to a mask of tokens: `[..., c]` -> `[..., c, 1, 1]`."""
    return None if x is None else x[..., None, None]


def arrived(tokens: int | Tensor, valid: Tensor | None) -> Tensor | None:
    """Which of the `tokens` new tokens of a stream are real, bool `[b, k]`; None if all are."""
    return None if valid is None else ops.arange(tokens, dtype="int32")[None] < valid[:, None]


def initial_state(sizes, case, dtype) -> State:
    """State before the first token, constant in n: `sum [b, h, s, e]`, float32, and `position [b]`, int32."""
    del case
    wide = "float64" if str(dtype) == "float64" else "float32"
    total = ops.zeros([sizes[axis] for axis in "bhse"], wide)
    return {"sum": total, "position": ops.zeros((sizes["b"],), "int32")}


def state_bytes(sizes, case, itemsize) -> int:
    del case, itemsize
    return sizes["b"] * (4 * sizes["h"] * sizes["s"] * sizes["e"] + 4)


def flops(sizes, case) -> int:
    """FLOPs of the state form, whatever the chunk: each token is added to the state, and the state is read."""
    del case
    return 4 * sizes["b"] * sizes["n"] * sizes["h"] * sizes["s"] * sizes["e"]


def shifted(x: Tensor, by: int | Tensor) -> Tensor:
    """`x[:, g - by]`, zero for negative indices: `[b, g, ...]` -> the same shape; `by` is at most g."""
    chunks, rest = ops.shape(x)[1], len(x.shape) - 2
    if isinstance(by, int):
        return ops.pad(x[:, : chunks - by], [[0, 0], [by, 0], *[[0, 0]] * rest])
    at = ops.arange(chunks, dtype="int32") - by  # XLA cannot slice to a length found at run time
    return zero_outside(ops.take(x, ops.maximum(at, 0), axis=1), ops.reshape(at >= 0, (1, -1, *[1] * rest)))


def after(upstream: Tensor, x: Tensor) -> Tensor:
    """x, by a zero that is there only after `upstream`: else a gradient takes what the forward pass has made of x."""
    first = ops.sum(upstream[(slice(1),) * len(upstream.shape)])  # 0 of an upstream without rows
    return x + ops.cast(ops.minimum(ops.square(first), 0), x.dtype)


def doubling(step: Callable[..., tuple], chunks: int | Tensor, *state: Tensor) -> tuple:
    """`state = step(by, *state)` for by = 1, 2, 4, ... below `chunks`.

    It is a loop only if the number of chunks is unknown before run time, because a loop has no gradient under XLA.
    """
    if not isinstance(chunks, int):
        more = lambda by, *state: by < chunks  # noqa: E731
        return ops.while_loop(more, lambda by, *state: (2 * by, *step(by, *state)), (ops.ones((), "int32"), *state))[1:]
    for i in range((chunks - 1).bit_length()):
        state = step(2**i, *state)
    return state


def running(decay: Tensor, x: Tensor) -> Tensor:
    """y[g] = decay[g] y[g - 1] + x[g], y[-1] = 0: an inclusive scan in log2(g) passes (Hillis and Steele).

    After the pass with step 2^i, each y holds its last 2^(i + 1) terms. The scan never divides or subtracts sums, so a
    decay to zero costs later terms no precision.

    Args:
      decay: `[b, g, h, s]`, `[b, g, h, 1]` or `[b, g, h, s, e]`.
      x: `[b, g, h, s, e]`.
    """
    shape, decays = ops.shape(x), math.prod(decay.shape[2:])
    # Four axes, because TensorFlow Lite slices no more.
    x = ops.reshape(x, (*shape[:2], decays, math.prod(x.shape[2:]) // decays))
    decay = ops.reshape(decay, (*shape[:2], decays, 1))
    return ops.reshape(ops.custom_gradient(_with_gradient)(decay, x), shape)


def _with_gradient(decay, x):
    """The scan, and its gradient by hand: the same scan backwards, which keeps only the states.

    A derived gradient would keep the inputs of each pass, log2(g) times as much.
    """
    y = _scan(decay, x)

    def gradient(dy):
        dy = ops.flip(dy, 1)
        dx = ops.flip(_scan(shifted(ops.flip(decay, 1), 1), dy), 1)
        return ops.sum(dx * shifted(y, 1), axis=-1, keepdims=True), dx

    return y, gradient


def _scan(decay, x):
    step = lambda by, decay, x: (decay * shifted(decay, by), x + decay * shifted(x, by))  # noqa: E731
    return doubling(step, ops.shape(x)[1], decay, x)[1]


def over_tokens(decay: Tensor, x: Tensor, chunk_size: int) -> Tensor:
    """y[i] = decay[i] y[i - 1] + x[i], y[-1] = 0, for every channel on its own: all `[b, n, ...]`.

    The tokens of a chunk come one after another, in all chunks at once. Then the scan of `running` joins the chunks.
    Each number is read and written a few times, not in log2(n) passes. A derived gradient would keep every step, so
    callers write the gradient by hand.
    """
    shape, c = ops.shape(x), chunk_size if x.shape[1] is None else max(1, min(chunk_size, x.shape[1]))
    features = math.prod(x.shape[2:])  # one axis, because TensorFlow Lite slices four at most
    decay, x = (fold(ops.reshape(part, (*shape[:2], features)), c) for part in (decay, x))
    since, y = [decay[:, :, 0]], [x[:, :, 0]]  # [b, g, f] each
    for i in range(1, c):
        since.append(decay[:, :, i] * since[-1])
        y.append(decay[:, :, i] * y[-1] + x[:, :, i])
    enters = _scan(shifted(since[-1], 1), shifted(y[-1], 1))
    y = ops.stack(y, axis=2) + ops.stack(since, axis=2) * enters[:, :, None]
    return ops.reshape(unfold(y, shape[1]), shape)


def entering(last: Tensor) -> Tensor:
    """The document of the last real token before each chunk, 0 if there is none. The entering state belongs to it.

    Args:
      last: Document of the last real token of each chunk, int32 `[b, g]`, 0 for a chunk of padding.
    """
    step = lambda by, latest: (ops.where(latest > 0, latest, shifted(latest, by)),)  # noqa: E731
    return doubling(step, ops.shape(last)[1], shifted(last, 1))[0]


def by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    weigh: Callable[..., Tensor],
    *,
    chunk_size: int,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    start: Tensor | None = None,
    value_log_decay: Tensor | None = None,
    mix: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention with decay: pairs of tokens inside chunks, and a state that enters each chunk.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      log_decay: `[b, n, h, s]`, or `[b, n, h, 1]` if all channels share it.
      weigh: Maps q, k and log decays on chunks, `[b, g, c, h, .]`, and a mask of pairs to weights `[b, g, h, i, j]`.
      chunk_size: c.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding.
      start: The state before the first token, `[b, h, s, e]`. If given, the state after the last is returned too.
      value_log_decay: Log decay of a state's columns; `log_decay` belongs to its rows. `[b, n, h, e]`, or None.
      mix: Given with `value_log_decay`. Maps weights, values and their log decays on chunks to the sums inside chunks.

    Returns:
      `[b, n, h, e]`, 0 at padding, and the state after the last token, or None without `start`.
    """
    n, ids = ops.shape(v)[1], documents(padding_mask, segment_ids)
    real, c = None if ids is None else ids > 0, fitting(chunk_size, v.shape[1])
    log_decays = [log_decay] if value_log_decay is None else [log_decay, value_log_decay]
    log_decays = [ops.cast(x, sum_dtype(x)) for x in log_decays]
    k, v, *log_decays = (zero_outside(x, of_heads(real)) for x in (k, v, *log_decays))
    q, k, v, log_decay, *of_values = (fold(x, c) for x in (q, k, v, *log_decays))
    packed = None if segment_ids is None else fold(ids, c)  # [b, g, c]
    at = ops.arange(c, dtype="int32")
    weights = weigh(q, k, log_decay, over_heads(attention_mask(packed, packed, at, at, causal=True)))
    out = mix(weights, v, *of_values) if of_values else ops.einsum("bghij,bgjhe->bgihe", weights, v)

    since, *of_values = (ops.cumsum(x, axis=2) for x in (log_decay, *of_values))  # [b, g, c, h, .]
    whole = since[:, :, -1:]
    passes = ops.exp(whole[:, :, 0])  # [b, g, h, s]
    q, k = _decayed(q, since), _decayed(k, whole - since)
    for x in of_values:
        v = _decayed(v, x[:, :, -1:] - x)
        passes = passes[..., None] * ops.exp(x[:, :, -1])[..., None, :]  # [b, g, h, s, e]
    if packed is not None:
        first, last = edges(packed)
        enter = entering(last)
        # A chunk of padding passes the state on. A chunk in which a document begins or ends does not.
        on = ops.logical_or(last == 0, ops.logical_and(enter == first, first == last))
        q, k = (
            zero_outside(q, of_heads(packed == enter[..., None])),
            zero_outside(k, of_heads(packed == last[..., None])),
        )
        passes = zero_outside(passes, like(on, passes))
    sums = ops.cast(ops.einsum("bgjhs,bgjhe->bghse", k, v), passes.dtype)
    enters, after = _states(ops.broadcast_to(passes, ops.shape(sums)) if of_values else passes, sums, start)
    before = ops.einsum("bgihs,bghse->bgihe", q, ops.cast(enters, q.dtype))
    for x in of_values:
        before = _decayed(before, x)
    out = unfold(out + before, n)
    return out if real is None else zero_outside(out, of_heads(real)), after


def _decayed(x, log):
    """`x exp(log)`, multiplied in float32 and rounded once."""
    return ops.cast(ops.cast(x, log.dtype) * ops.exp(log), x.dtype)


def _states(passes, sums, start):
    """The states that enter the chunks, `[b, g, h, s, e]`, and with `start` the state after the last chunk."""
    if start is None:
        return running(shifted(passes, 1), shifted(sums, 1)), None
    x = ops.concatenate([start[:, None], sums], axis=1)
    y = running(ops.pad(passes, [[0, 0], [1, 0], *[[0, 0]] * (len(passes.shape) - 2)]), x)
    return y[:, :-1], y[:, -1]


def extend(state, q, k, v, log_decay, weigh, *, chunk_size, valid=None, value_log_decay=None, mix=None):
    """The next k tokens of each row; log decays are `[b, k, h, s]` or `[b, k, h, 1]`. One token costs O(h s e)."""
    total, tokens = state["sum"], ops.shape(v)[1]
    real = arrived(tokens, valid)
    position = state["position"] + (tokens if valid is None else valid)
    if v.shape[1] != 1:
        of_values = {"value_log_decay": value_log_decay, "mix": mix}
        chunks = {"chunk_size": chunk_size, "padding_mask": real, "start": total, **of_values}
        out, total = by_chunks(q, k, v, log_decay, weigh, **chunks)
        return out, {"sum": total, "position": position}
    given = (k, v, log_decay) if value_log_decay is None else (k, v, log_decay, value_log_decay)
    new = (zero_outside(x, of_heads(real)) for x in given)
    k, v1, log_decay, *of_values = (ops.cast(x[:, 0], total.dtype) for x in new)
    for x in of_values:
        total = ops.exp(x)[:, :, None] * total
    total = ops.exp(log_decay)[..., None] * total + k[..., None] * v1[:, :, None]
    return read(total, q, v.dtype), {"sum": total, "position": position}


def read(total, q, dtype):
    """Reads a state with one query a row: `[b, h, s, e]`, `[b, 1, h, s]` -> `[b, 1, h, e]`."""
    return ops.cast(accumulate.weighted_sum(ops.cast(q[:, 0], total.dtype), total), dtype)[:, None]
