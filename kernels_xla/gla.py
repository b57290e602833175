"""Gated linear attention: linear attention with a decay for each channel and token.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv:2312.06635,
section 3. The gates of values are from its first version.
"""

import math

from keras import ops

from kernels_xla.common import recurrence
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.masks import documents, zero_outside
from kernels_xla.common.recurrence import SUBCHUNK
from kernels_xla.common.spec import KernelSpec, Stream, Tensor


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    value_log_decay: Tensor | None = None,
    *,
    chunk_size: int = 64,
    causal: bool = True,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """out[i] = sum over j <= i of (q[i] . (alpha[i, j] * k[j])) (beta[i, j] * v[j]), for each head.

    alpha[i, j] is exp(sum over j < l <= i of log_decay[l]). beta[i, j] is the same for value_log_decay.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      log_decay: `[b, n, h, s]`, never positive, of any size. Give it in float32. None for no decay.
      value_log_decay: `[b, n, h, e]`, as `log_decay`.
      chunk_size: c, tokens of a chunk, taken in pairs. It changes only the speed. Multiples of 16 are the fastest.
      causal: Must be True: a decay needs an order.
      padding_mask: `[b, n]`, True at real tokens. Padding decays nothing and is not read.
      segment_ids: `[b, n]`, 0 at padding. Each document starts from an empty state.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Raises:
      ValueError: `causal` is False.

    Cost:
      O(n h (c (s + e) + s e)) multiply-adds, and O(n h 16 s) exponentials and elementwise products.
      O(n h (c s / 16 + e) + (n / c) h s e) memory: linear in n. The states between chunks take log2(n / c) passes.
      Decays of values cost the same, with e for s. The decays of states are then as large as the states.

    Precision:
      Decays, states and the weights of near tokens are float32. Products are in the dtype of the inputs and accumulate
      in float32. No exponent is above 0, so no decay overflows.
    """
    recurrence.check_causal("gla", causal)
    masks = {"padding_mask": padding_mask, "segment_ids": segment_ids}
    decays = _decays(k, log_decay, value_log_decay)
    return recurrence.by_chunks(q, k, v, **decays, chunk_size=chunk_size, **masks)[0]


def _decays(k, log_decay, value_log_decay):
    """The arguments of `recurrence` for the decays. Either decay may be None."""
    of_values = {"value_log_decay": value_log_decay, "mix": _mixed}
    if log_decay is not None:
        return {"log_decay": log_decay, "weigh": _weights, **of_values}
    return {"log_decay": ops.zeros_like(k[..., :1]), "weigh": _products, **of_values}


def _products(q, k, log_decay, seen):
    """The same as `_weights`, without decay."""
    return zero_outside(ops.einsum("bgihs,bgjhs->bghij", q, k), seen)


def _weights(q, k, log_decay, seen):
    """The weights of the pairs of a chunk, in m sub-chunks of u: all `[b, g, c, h, s]`, seen -> `[b, g, h, i, j]`.

    exp(a[i] - a[j]) is the product of a factor of i and a factor of j. Both stay in range only if they refer to a token
    between i and j. For a key of an earlier sub-chunk, this is the first token of the query's sub-chunk.
    """
    b, g, c, h, s = ops.shape(q)[0], ops.shape(q)[1], *q.shape[2:]
    u, dtype = math.gcd(c, SUBCHUNK), q.dtype
    m = c // u
    # axis x joins b, g and h
    q, k, log_decay = (
        ops.reshape(ops.cast(ops.transpose(x, (0, 1, 3, 2, 4)), log_decay.dtype), (-1, c, s)) for x in (q, k, log_decay)
    )
    cut = lambda x: ops.reshape(x, (-1, m, u, s))  # noqa: E731
    near = ops.cast(_near(*(ops.reshape(x, (-1, u, s)) for x in (q, k, log_decay))), dtype)  # [x m, i, j]
    if m > 1:
        since = ops.cumsum(log_decay, axis=1)  # [x, c, s]
        first = cut(since)[:, :, :1]  # [x, m, 1, s]
        earlier = ops.arange(c, dtype="int32")[None, :] < u * ops.arange(m, dtype="int32")[:, None]  # [m, j]
        until = ops.where(earlier[:, :, None], first - since[:, None], -math.inf)  # [x, m, c, s]
        queries = ops.cast(cut(q) * ops.exp(cut(since) - first), dtype)
        far = ops.einsum("xmis,xmjs->xmij", queries, ops.cast(k[:, None] * ops.exp(until), dtype))
        block = ops.cast(ops.eye(m)[:, None, :, None], dtype)
        near = ops.reshape(far, (-1, m, u, m, u)) + block * ops.reshape(near, (-1, m, u, 1, u))
    return zero_outside(ops.reshape(near, (b, g, h, c, c)), seen)


def _near(q, k, log_decay):
    """The weights of the pairs of a sub-chunk, element by element: all `[x, u, s]`, float32 -> `[x, i, j]`.

    The diagonal has no decay. It is separate, so that its gradient does not cancel.
    """
    own = ops.sum(q * k, axis=-1)[:, :, None] * ops.eye(q.shape[1], dtype=q.dtype)
    return ops.custom_gradient(_before)(q, k, ops.cumsum(log_decay, axis=1)) + own


def _before(q, k, since):
    """The weights of the pairs j < i, with a gradient by hand that recomputes the decays instead of keeping them."""
    at = ops.arange(q.shape[1], dtype="int32")
    earlier = (at[None, :] < at[:, None])[:, :, None]  # [i, j, 1]

    def decays():  # `[x, i, j, s]`, masked before exp, which would overflow above the diagonal
        return ops.exp(ops.where(earlier, since[:, :, None] - since[:, None], -math.inf))

    def gradient(*arguments, upstream=None):  # Keras passes it by name on JAX, by position on TensorFlow
        weights = (arguments[0] if upstream is None else upstream)[..., None] * decays()
        dq, dk = ops.sum(weights * k[:, None], axis=2), ops.sum(weights * q[:, :, None], axis=1)
        return dq, dk, q * dq - k * dk

    return ops.sum(q[:, :, None] * k[:, None] * decays(), axis=-1), gradient


def _mixed(weights, v, log_decay):
    """The sums inside a chunk, in m sub-chunks of u: weights `[b, g, h, i, j]`, all else `[b, g, c, h, e]`.

    Decays of values are split like decays of keys, see `_weights`: the first token of a query's sub-chunk lies between
    the query and the tokens of earlier sub-chunks.
    """
    b, g, c, h, e = ops.shape(v)[0], ops.shape(v)[1], *v.shape[2:]
    u, dtype = math.gcd(c, SUBCHUNK), v.dtype
    m = c // u
    v, log_decay = (
        ops.reshape(ops.cast(ops.transpose(x, (0, 1, 3, 2, 4)), log_decay.dtype), (-1, c, e)) for x in (v, log_decay)
    )
    weights = ops.reshape(weights, (-1, m, u, c))
    block = ops.cast(ops.eye(m)[:, None, :, None], dtype)
    own = ops.cast(ops.sum(ops.reshape(weights, (-1, m, u, m, u)) * block, axis=3), log_decay.dtype)  # [x, m, i, j]
    cut = lambda x: ops.reshape(x, (-1, m, u, e))  # noqa: E731
    out = cut(_near_values(ops.reshape(own, (-1, u, u)), *(ops.reshape(x, (-1, u, e)) for x in (v, log_decay))))
    if m > 1:
        since = ops.cumsum(log_decay, axis=1)  # [x, c, e]
        first = cut(since)[:, :, :1]  # [x, m, 1, e]
        earlier = ops.arange(c, dtype="int32")[None, :] < u * ops.arange(m, dtype="int32")[:, None]  # [m, j]
        until = ops.where(earlier[:, :, None], first - since[:, None], -math.inf)  # [x, m, c, e]
        far = ops.einsum("xmij,xmje->xmie", weights, ops.cast(v[:, None] * ops.exp(until), dtype))
        out = out + ops.cast(far, log_decay.dtype) * ops.exp(cut(since) - first)
    return ops.transpose(ops.reshape(ops.cast(out, dtype), (b, g, h, c, e)), (0, 1, 3, 2, 4))


def _near_values(weights, v, log_decay):
    """The sums inside a sub-chunk, element by element: weights `[x, i, j]`, the others and the result `[x, u, e]`."""
    own = ops.sum(weights * ops.eye(v.shape[1], dtype=v.dtype), axis=-1)[..., None] * v  # as in `_near`
    return ops.custom_gradient(_of_earlier)(weights, v, ops.cumsum(log_decay, axis=1)) + own


def _of_earlier(weights, v, since):
    """The sums over the tokens j < i, and the gradient by hand, as in `_before`."""
    at = ops.arange(v.shape[1], dtype="int32")
    earlier = (at[None, :] < at[:, None])[:, :, None]  # [i, j, 1]
    decays = lambda: ops.exp(ops.where(earlier, since[:, :, None] - since[:, None], -math.inf))  # noqa: E731
    out = ops.sum(weights[..., None] * decays() * v[:, None], axis=2)

    def gradient(*arguments, upstream=None):  # Keras passes it by name on JAX, by position on TensorFlow
        dout = arguments[0] if upstream is None else upstream
        left = decays() * dout[:, :, None]  # [x, i, j, e]
        dv = ops.sum(weights[..., None] * left, axis=1)
        return ops.sum(left * v[:, None], axis=-1), dv, dout * out - v * dv

    return out, gradient


def gated_linear_attention_reference(
    q,
    k,
    v,
    log_decay=None,
    value_log_decay=None,
    *,
    chunk_size=None,
    causal=True,
    padding_mask=None,
    segment_ids=None,
):
    """The sum over dense decays `[b, i, j, h, s]` and `[b, i, j, h, e]`."""
    del chunk_size, causal  # they do not change the function
    ids = documents(padding_mask, segment_ids)
    ids = ops.ones(v.shape[:2], "int32") if ids is None else ids
    seen = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    seen = seen & ops.tril(ops.ones((v.shape[1], v.shape[1]), "bool"))  # [b, i, j]

    def decays(log):
        until = ops.cumsum(ops.cast(log, sum_dtype(v)) * ops.cast(ids > 0, sum_dtype(v))[..., None, None], axis=1)
        decay = ops.exp(ops.where(seen[..., None, None], until[:, :, None] - until[:, None], -math.inf))
        return ops.cast(decay, v.dtype)

    alpha = decays(ops.zeros_like(k) if log_decay is None else log_decay)
    weights = ops.sum(q[:, :, None] * k[:, None] * alpha, axis=-1)  # [b, i, j, h]
    if value_log_decay is None:
        return ops.einsum("bijh,bjhe->bihe", weights, v)
    return ops.sum(weights[..., None] * decays(value_log_decay) * v[:, None], axis=2)


def extend(state, q, k, v, log_decay=None, value_log_decay=None, *, valid=None, chunk_size=64, causal=True):
    """The next k tokens of each row. One token costs O(h s e); more tokens take the chunk-parallel form."""
    recurrence.check_causal("gla", causal)
    decays = _decays(k, log_decay, value_log_decay)
    return recurrence.extend(state, q, k, v, **decays, chunk_size=chunk_size, valid=valid)


SPEC = KernelSpec(
    name="gla",
    fast=gated_linear_attention,
    reference=gated_linear_attention_reference,
    stream=Stream(initial_state=recurrence.initial_state, extend=extend, supports=lambda case: True),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe", "log_decay": "bnhs", "value_log_decay": "bnhe"},
    flops=recurrence.flops,
    state_bytes=recurrence.state_bytes,
    ranges={"log_decay": (-1.0, 0.0), "value_log_decay": (-1.0, 0.0)},
)
