"""Retention: linear attention with a decay for each head and token.

Source: Sun et al., "Retentive Network", arXiv:2307.08621, section 2.1. The paper's decay is constant.
"""

from keras import ops

from kernels_xla.common import recurrence
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.masks import documents, zero_outside
from kernels_xla.common.spec import KernelSpec, Stream, Tensor


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    chunk_size: int = 128,
    causal: bool = True,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """out[i] = sum over j <= i of exp(sum over j < l <= i of log_decay[l]) (q[i] . k[j]) v[j], for each head.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      log_decay: `[b, n, h]`, never positive.
      chunk_size: c, tokens of a chunk, taken in pairs. It changes only the speed.
      causal: Must be True: a decay needs an order.
      padding_mask: `[b, n]`, True at real tokens. Padding decays nothing and is not read.
      segment_ids: `[b, n]`, 0 at padding. Each document starts from an empty state.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Raises:
      ValueError: `causal` is False.

    Cost:
      O(n h (c (s + e) + s e)) multiply-adds, O(n h (c + e) + (n / c) h s e) memory: linear in n. The states between
      chunks take log2(n / c) passes.

    Precision:
      Decays and states are float32. Products are in the dtype of the inputs and accumulate in float32.
    """
    recurrence.check_causal("retention", causal)
    masks = {"padding_mask": padding_mask, "segment_ids": segment_ids}
    return recurrence.by_chunks(q, k, v, log_decay[..., None], _weights, chunk_size=chunk_size, **masks)[0]


def _weights(q, k, log_decay, seen):
    """Weights of the pairs of a chunk: q, k `[b, g, c, h, s]`, decays `[b, g, c, h, 1]`, seen -> `[b, g, h, i, j]`."""
    since = ops.swapaxes(ops.cumsum(log_decay[..., 0], axis=2), 2, 3)  # [b, g, h, c]
    at = ops.arange(q.shape[2], dtype="int32")
    # Masked before exp, which would overflow above the diagonal and make the gradient NaN. The diagonal has no decay.
    # It is masked too, so that its gradient does not cancel.
    log = zero_outside(since[..., :, None] - since[..., None, :], ops.logical_and(seen, at[None, :] < at[:, None]))
    scores = ops.einsum("bgihs,bgjhs->bghij", q, k)
    return zero_outside(ops.cast(ops.exp(log), q.dtype) * scores, seen)


def retention_reference(q, k, v, log_decay, *, chunk_size=None, causal=True, padding_mask=None, segment_ids=None):
    """The sum over dense `[b, h, i, j]` weights."""
    del chunk_size, causal  # they do not change the function
    ids = documents(padding_mask, segment_ids)
    ids = ops.ones(v.shape[:2], "int32") if ids is None else ids
    seen = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    seen = (seen & ops.tril(ops.ones((v.shape[1], v.shape[1]), "bool")))[:, None]  # [b, 1, i, j]
    log = ops.cast(log_decay, sum_dtype(v)) * ops.cast(ids > 0, sum_dtype(v))[..., None]
    until = ops.swapaxes(ops.cumsum(log, axis=1), 1, 2)  # [b, h, n]
    decay = ops.exp(ops.where(seen, until[..., :, None] - until[..., None, :], -float("inf")))
    return ops.einsum("bhij,bjhe->bihe", ops.einsum("bihs,bjhs->bhij", q, k) * ops.cast(decay, v.dtype), v)


def extend(state, q, k, v, log_decay, *, valid=None, chunk_size=128, causal=True):
    """The next k tokens of each row. One token costs O(h s e); more tokens take the chunk-parallel form."""
    recurrence.check_causal("retention", causal)
    return recurrence.extend(state, q, k, v, log_decay[..., None], _weights, chunk_size=chunk_size, valid=valid)


SPEC = KernelSpec(
    name="retention",
    fast=retention,
    reference=retention_reference,
    stream=Stream(initial_state=recurrence.initial_state, extend=extend, supports=lambda case: True),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe", "log_decay": "bnh"},
    flops=recurrence.flops,
    state_bytes=recurrence.state_bytes,
    ranges={"log_decay": (-0.5, 0.0)},
)
