"""Linear attention with one decay a key channel and token: gated linear attention.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv:2312.06635,
section 3. Of its gates those of the keys; the first version's gates of the values are not here.
"""

import math

from keras import ops

from kernels_xla import recurrence
from kernels_xla.accumulate import sum_dtype
from kernels_xla.masks import documents, keep
from kernels_xla.recurrence import SUBCHUNK
from kernels_xla.spec import KernelSpec, Stream, Tensor


def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    chunk_size: int = 64,
    causal: bool = True,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """out[i] = sum over j <= i of (q[i] . (exp(sum over j < l <= i of log_decay[l]) * k[j])) v[j], for each head.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      log_decay: `[b, n, h, s]`, never positive, however small. Give it in float32.
      chunk_size: c, tokens that are taken in pairs. It changes the speed alone: any value gives the same function.
        Multiples of 16 are the fastest.
      causal: True, being so by definition.
      padding_mask: `[b, n]`, True at real tokens. The others decay nothing, and are not read.
      segment_ids: `[b, n]`, 0 at padding; a document starts from nothing.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Raises:
      ValueError: It is not causal.

    Cost:
      O(n h (c (s + e) + s e)) multiply-adds, and O(n h 16 s) exponentials and products that are not matrix products;
      O(n h (c s / 16 + e) + (n / c) h s e) memory: linear in n. The states between chunks take log2(n / c) passes.

    Precision:
      Decays, states and the weights of near tokens are float32; products are in the dtype of the inputs and accumulate
      in float32. No exponent is above 0, so that no decay overflows.
    """
    recurrence.check_causal("gated attention", causal)
    masks = {"padding_mask": padding_mask, "segment_ids": segment_ids}
    return recurrence.by_chunks(q, k, v, log_decay, _weights, chunk_size=chunk_size, **masks)[0]


def _weights(q, k, log_decay, seen):
    """Of the pairs of a chunk, in m sub-chunks of u: all `[b, g, c, h, s]`, seen -> `[b, g, h, i, j]`.

    exp(a[i] - a[j]) is no product of a factor of i and one of j that both stay in range, unless a token between is what
    they refer to. For a key of an earlier sub-chunk that is the first token of the query's.
    """
    b, g, c, h, s = ops.shape(q)[0], ops.shape(q)[1], *q.shape[2:]
    u, dtype = math.gcd(c, SUBCHUNK), q.dtype
    m = c // u
    # x for every b, g and h together
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
    return keep(ops.reshape(near, (b, g, h, c, c)), seen)


def _near(q, k, log_decay):
    """Of the pairs of a sub-chunk, element by element: all `[x, u, s]`, float32 -> `[x, i, j]`.

    On the diagonal nothing decays; were it among the pairs, the gradient of nothing would be the difference of two
    large parts.
    """
    own = ops.sum(q * k, axis=-1)[:, :, None] * ops.eye(q.shape[1], dtype=q.dtype)
    return ops.custom_gradient(_before)(q, k, ops.cumsum(log_decay, axis=1)) + own


def _before(q, k, since):
    """Of the pairs j < i, and its gradient by hand: the decays of all pairs are made again and not kept."""
    at = ops.arange(q.shape[1], dtype="int32")
    earlier = (at[None, :] < at[:, None])[:, :, None]  # [i, j, 1]

    def decays():  # masked before they are exponents, which would overflow above the diagonal: `[x, i, j, s]`
        return ops.exp(ops.where(earlier, since[:, :, None] - since[:, None], -math.inf))

    def gradient(*arguments, upstream=None):  # Keras passes it by name on JAX, TensorFlow by place
        weights = (arguments[0] if upstream is None else upstream)[..., None] * decays()
        dq, dk = ops.sum(weights * k[:, None], axis=2), ops.sum(weights * q[:, :, None], axis=1)
        return dq, dk, q * dq - k * dk

    return ops.sum(q[:, :, None] * k[:, None] * decays(), axis=-1), gradient


def gated_attention_reference(q, k, v, log_decay, *, chunk_size=None, causal=True, padding_mask=None, segment_ids=None):
    """The sum over dense decays `[b, i, j, h, s]`."""
    del chunk_size, causal  # any chunk gives the same function, and it knows no other order
    ids = documents(padding_mask, segment_ids)
    ids = ops.ones(v.shape[:2], "int32") if ids is None else ids
    seen = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    seen = seen & ops.tril(ops.ones((v.shape[1], v.shape[1]), "bool"))  # [b, i, j]
    log = ops.cast(log_decay, sum_dtype(v)) * ops.cast(ids > 0, sum_dtype(v))[..., None, None]
    until = ops.cumsum(log, axis=1)
    decay = ops.exp(ops.where(seen[..., None, None], until[:, :, None] - until[:, None], -math.inf))
    weights = ops.sum(q[:, :, None] * k[:, None] * ops.cast(decay, v.dtype), axis=-1)  # [b, i, j, h]
    return ops.einsum("bijh,bjhe->bihe", weights, v)


def extend(state, q, k, v, log_decay, *, valid=None, chunk_size=64, causal=True):
    """The next k tokens of each row: one token costs O(h s e), more take the chunk-parallel form."""
    recurrence.check_causal("gated attention", causal)
    return recurrence.extend(state, q, k, v, log_decay, _weights, chunk_size=chunk_size, valid=valid)


SPEC = KernelSpec(
    name="gated",
    fast=gated_attention,
    reference=gated_attention_reference,
    stream=Stream(initial_state=recurrence.initial_state, extend=extend, supports=lambda case: True),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe", "log_decay": "bnhs"},
    cases=({"chunk_size": 4, "causal": True}, {"chunk_size": 32, "causal": True}),
    timed={"causal": True},
    flops=recurrence.flops,
    state_bytes=recurrence.state_bytes,
    ranges={"log_decay": (-1.0, 0.0)},
)
