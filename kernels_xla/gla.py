"""Gated linear attention: linear attention with a decay for each channel and token.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv:2312.06635,
section 3. The gates of values are from its first version.
"""

import math

from keras import ops

from kernels_xla.common import recurrence
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.masks import documents, zero_outside
from kernels_xla.common.spec import KernelSpec, Stream, Tensor

NEAR = 8  # tokens; pairs of tokens inside so many are taken element by element


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
      chunk_size: c, tokens of a chunk, taken in pairs. It changes only the speed. Chunks of more than 8 tokens are
        padded to a power of 2.
      causal: Must be True: a decay needs an order.
      padding_mask: `[b, n]`, True at real tokens. Padding decays nothing and is not read.
      segment_ids: `[b, n]`, 0 at padding. Each document starts from an empty state.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Raises:
      ValueError: `causal` is False.

    Cost:
      O(n h (c (s + e) + s e)) multiply-adds, and O(n h (8 + log2(c / 8)) s) exponentials and elementwise products.
      O(n h (c + s + e) + (n / c) h s e) memory: linear in n. The states between chunks take log2(n / c) passes.
      Decays of values cost the same, with e for s. The decays of states are then as large as the states.

    Precision:
      Decays and states are float32. Products are in the dtype of the inputs and accumulate in float32. No exponent is
      above 0, so no decay overflows.
    """
    recurrence.check_causal("gla", causal)
    masks = {"padding_mask": padding_mask, "segment_ids": segment_ids}
    decays = _arguments(k, log_decay, value_log_decay)
    return recurrence.by_chunks(q, k, v, **decays, chunk_size=chunk_size, **masks)[0]


def _arguments(k, log_decay, value_log_decay):
    """The arguments of `recurrence` for the decays. Either decay may be None."""
    of_values = {"value_log_decay": value_log_decay, "mix": _mixed}
    if log_decay is not None:
        return {"log_decay": log_decay, "weigh": _weights, **of_values}
    return {"log_decay": ops.zeros_like(k[..., :1]), "weigh": _products, **of_values}


def _products(q, k, log_decay, seen):
    """The same as `_weights`, without decay."""
    return zero_outside(ops.einsum("bgihs,bgjhs->bghij", q, k), seen)


def _weights(q, k, log_decay, seen):
    """The weights of the pairs of a chunk: all `[b, g, c, h, s]`, seen -> `[b, g, h, i, j]`.

    The diagonal has no decay. It is kept apart: in q dq - k dk its two parts would cancel up to rounding alone.
    """
    b, g, c, h, _ = ops.shape(q)[0], ops.shape(q)[1], *q.shape[2:]
    dtype = q.dtype
    q, k, log_decay = (_rows(x, log_decay.dtype) for x in (q, k, log_decay))
    earlier = ops.custom_gradient(lambda *x: _of_pairs(dtype, *x))(q, k, ops.cumsum(log_decay, axis=1))
    own = ops.sum(q * k, axis=-1)[:, :, None] * ops.eye(q.shape[1], dtype=q.dtype)
    return zero_outside(ops.reshape((earlier + ops.cast(own, dtype))[:, :c, :c], (b, g, h, c, c)), seen)


def _mixed(weights, v, log_decay):
    """The sums inside a chunk: weights `[b, g, h, i, j]`, all else `[b, g, c, h, e]`."""
    b, g, c, h, e = ops.shape(v)[0], ops.shape(v)[1], *v.shape[2:]
    dtype = v.dtype
    v, log_decay = (_rows(x, log_decay.dtype) for x in (v, log_decay))
    behind = [0, v.shape[1] - c]
    weights = ops.pad(ops.reshape(ops.cast(weights, dtype), (-1, c, c)), [[0, 0], behind, behind])
    own = ops.sum(weights * ops.eye(v.shape[1], dtype=dtype), axis=-1)
    earlier = ops.custom_gradient(lambda *x: _of_values(dtype, *x))(weights, v, ops.cumsum(log_decay, axis=1))
    out = ops.cast(earlier + ops.cast(own, v.dtype)[..., None] * v, dtype)
    return ops.transpose(ops.reshape(out[:, :c], (b, g, h, c, e)), (0, 1, 3, 2, 4))


def _rows(x, dtype):
    """`[b, g, c, h, s]` -> `[x, c, s]`, x for b, g and h, with zeros behind up to a length that halves to `NEAR`."""
    c, s = x.shape[2], x.shape[4]
    whole = c if c <= NEAR else NEAR << (-(-c // NEAR) - 1).bit_length()
    x = ops.reshape(ops.cast(ops.transpose(x, (0, 1, 3, 2, 4)), dtype), (-1, c, s))
    return ops.pad(x, [[0, 0], [0, whole - c], [0, 0]])


# exp(a[i] - a[j]) is the product of a factor of i and a factor of j. Both stay in range only if they refer to a token
# between i and j. So a chunk is halved again and again: between the halves of a part, this token is the first of the
# second half, and the pairs are a product of matrices. The pairs of the smallest parts are taken element by element.
# Gradients are by hand. They make the decays again, see `recurrence.after`, and the token of reference has no gradient.


def _sizes(whole):
    """The sizes of the halves, the smallest first."""
    return [size for i in range(whole.bit_length()) if (size := NEAR << i) < whole]


def _halves(x, size):
    """`[x, c, s]` -> the first halves of its parts, and the second ones, `[x m, size, s]` each."""
    x = ops.reshape(x, (-1, 2 * size, x.shape[-1]))
    return x[:, :size], x[:, size:]


def _decays(since, size):
    """The factors of the tokens of the first halves, and of the second ones: `[x m, size, s]` each, 1 at most."""
    first, second = _halves(since, size)
    return ops.exp(second[:, :1] - first), ops.exp(second - second[:, :1])


def _decays_near(since):
    """The decays of the smallest parts' pairs j < i, `[x m, i, j, s]`; masked before exp, which would overflow."""
    at = ops.arange(since.shape[1], dtype="int32")
    return ops.exp(ops.where((at[None] < at[:, None])[..., None], since[:, :, None] - since[:, None], -math.inf))


def _joined(own, far):
    """Both halves' pairs and the pairs between them, `[2 x, i, j]` and `[x, i, j]` -> the pairs of the part."""
    own = ops.reshape(own, (-1, 2, *own.shape[1:]))
    rows = (ops.concatenate([own[:, 0], ops.zeros_like(far)], axis=2), ops.concatenate([far, own[:, 1]], axis=2))
    return ops.concatenate(rows, axis=1)


def _split(pairs):
    """The reverse of `_joined`: each half's own pairs, and those between the halves."""
    u = pairs.shape[1] // 2
    own = ops.stack([pairs[:, :u, :u], pairs[:, u:, u:]], axis=1)
    return ops.reshape(own, (-1, u, u)), pairs[:, u:, :u]


def _of_pairs(dtype, q, k, since):
    """The weights of the pairs j < i, `[x, i, j]` in `dtype`, and their gradient; all else is float32."""
    (_, c, s), parts = q.shape, lambda x: ops.reshape(x, (-1, min(NEAR, x.shape[1]), x.shape[2]))

    def factors(since, size):
        of_keys, of_queries = _decays(since, size)
        keys, queries = _halves(k, size)[0] * of_keys, _halves(q, size)[1] * of_queries
        return of_keys, of_queries, ops.cast(keys, dtype), ops.cast(queries, dtype)

    def gradient(pairs):
        again, dq, dk = recurrence.after(pairs, since), 0, 0
        for size in reversed(_sizes(c)):
            of_keys, of_queries, keys, queries = factors(again, size)
            pairs, far = _split(pairs)
            left = ops.cast(ops.einsum("xij,xjs->xis", far, keys), q.dtype) * of_queries
            right = ops.cast(ops.einsum("xij,xis->xjs", far, queries), q.dtype) * of_keys
            dq += ops.reshape(ops.pad(left, [[0, 0], [size, 0], [0, 0]]), (-1, c, s))
            dk += ops.reshape(ops.pad(right, [[0, 0], [0, size], [0, 0]]), (-1, c, s))
        pairs = ops.cast(pairs, q.dtype)[..., None] * _decays_near(parts(again))
        dq += ops.reshape(ops.sum(pairs * parts(k)[:, None], axis=2), (-1, c, s))
        dk += ops.reshape(ops.sum(pairs * parts(q)[:, :, None], axis=1), (-1, c, s))
        return dq, dk, q * dq - k * dk

    pairs = parts(q)[:, :, None] * parts(k)[:, None] * _decays_near(parts(since))
    pairs = ops.cast(ops.sum(pairs, axis=-1), dtype)
    for size in _sizes(c):
        *_, keys, queries = factors(since, size)
        pairs = _joined(pairs, ops.einsum("xis,xjs->xij", queries, keys))
    return pairs, gradient


def _of_values(dtype, weights, v, since):
    """The sums over the tokens j < i, `[x, i, e]`, and their gradient; weights in `dtype`, all else in float32."""
    (_, c, e), parts = v.shape, lambda x: ops.reshape(x, (-1, min(NEAR, x.shape[1]), x.shape[2]))
    out, pairs = 0, weights
    for size in reversed(_sizes(c)):
        of_keys, of_queries = _decays(since, size)
        pairs, far = _split(pairs)
        values = ops.cast(_halves(v, size)[0] * of_keys, dtype)
        new = ops.cast(ops.einsum("xij,xje->xie", far, values), v.dtype) * of_queries
        out += ops.reshape(ops.pad(new, [[0, 0], [size, 0], [0, 0]]), (-1, c, e))
    near = ops.cast(pairs, v.dtype)[..., None] * _decays_near(parts(since)) * parts(v)[:, None]
    out += ops.reshape(ops.sum(near, axis=2), (-1, c, e))

    def gradient(dout):
        again, pairs, dv, far_pairs = recurrence.after(dout, since), weights, 0, []
        for size in reversed(_sizes(c)):
            of_keys, of_queries = _decays(again, size)
            pairs, far = _split(pairs)
            values = ops.cast(_halves(v, size)[0] * of_keys, dtype)
            left = ops.cast(_halves(dout, size)[1] * of_queries, dtype)
            far_pairs.append(ops.einsum("xie,xje->xij", left, values))
            new = ops.cast(ops.einsum("xij,xie->xje", far, left), v.dtype) * of_keys
            dv += ops.reshape(ops.pad(new, [[0, 0], [0, size], [0, 0]]), (-1, c, e))
        near = _decays_near(parts(again)) * parts(dout)[:, :, None]
        dv += ops.reshape(ops.sum(ops.cast(pairs, v.dtype)[..., None] * near, axis=1), (-1, c, e))
        dpairs = ops.cast(ops.sum(near * parts(v)[:, None], axis=-1), dtype)
        for far in reversed(far_pairs):
            dpairs = _joined(dpairs, far)
        return dpairs, dv, dout * out - v * dv

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
    decays = _arguments(k, log_decay, value_log_decay)
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
