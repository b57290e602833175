"""Mixed chunk attention of a Transformer (MC-TFM++): softmax inside a chunk, linear attention across, many heads.

Source: Hua et al., "Transformer Quality in Linear Time", arXiv:2202.10447, section 4.4. The paper says that MC-TFM++
"uses quadratic MHSA within each chunk and multi-head linear attention across chunks" and gives no formula. Ours is
FLASH's with softmax instead of squared ReLU.
"""

from keras import ops

from kernels_xla import diag_attention as diag
from kernels_xla.common import accumulate, recurrence
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.chunking import fold, sum_of_earlier, unfold
from kernels_xla.common.masks import documents, zero_outside
from kernels_xla.common.recurrence import of_heads
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.common.streaming import (
    append,
    emptied,
    filled,
    gather_tokens,
    leave_grid,
    on_grid,
    slice_tokens,
    when_full,
)
from kernels_xla.diag_attention import diag_attention, diag_attention_reference
from kernels_xla.linear_attention import across_chunks, linear_attention


def mc_tfm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lin_q: Tensor,
    lin_k: Tensor,
    *,
    chunk_size: int,
    causal: bool = False,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Adds softmax attention within each chunk to linear attention over chunks, for each head.

    With chunk(i) = i // c on the fixed grid of the row, position i receives

        sum over j of chunk(i):            softmax_j(q[i] . k[j] / sqrt(s)) v[j]
      + sum over j of the visible chunks:  (lin_q[i] . lin_k[j] / N) v[j]

    If `causal`, the first sum stops at j = i and the second takes the chunks before chunk(i). Otherwise the second
    takes every chunk, its own included. N counts the real tokens in the second sum. It is g c for chunk g of an
    unpadded row, so a causal row depends on no length. Both sums stay inside the document of i.

    Args:
      q: Queries of the first sum, `[b, n, h, s]`.
      k: Keys of the first sum, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      lin_q: Queries of the second sum, `[b, n, h, s]`.
      lin_k: Keys of the second sum, `[b, n, h, s]`.
      chunk_size: c, in tokens. Part of the model: changing it changes the function.
      causal: Whether position i may depend only on positions <= i.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; each document is one run. A causal document that starts on a multiple of c
        gets exactly the same result as alone.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n h (c (s + e) + s e)) multiply-adds, O(n h (c + e) + (n / c) h s e) memory: linear in n.

    Precision:
      Softmax and counts are float32. Products are in the dtype of the inputs and accumulate in float32, also over
      chunks.
    """
    masks = {"padding_mask": padding_mask, "segment_ids": segment_ids}
    near = diag_attention(q, k, v, chunk_size=chunk_size, causal=causal, **masks)
    n, ids = ops.shape(v)[1], documents(padding_mask, segment_ids)
    real = ops.ones(ops.shape(v)[:2], "float32") if ids is None else ops.cast(ids > 0, "float32")
    one = of_heads(real)  # [b, n, 1, 1]: its sum counts tokens
    if not causal:
        lin_q = _shared(lin_q, linear_attention(one, one, one, chunk_size=chunk_size, **masks))
        return near + linear_attention(lin_q, lin_k, v, chunk_size=chunk_size, **masks)
    if ids is not None:
        lin_k, lin_q = (zero_outside(x, of_heads(ids > 0)) for x in (lin_k, lin_q))
    packed = None if segment_ids is None else fold(ids, chunk_size)
    one, lin_q, lin_k, v = (fold(x, chunk_size) for x in (one, lin_q, lin_k, v))
    lin_q = _shared(lin_q, across_chunks(one, one, one, packed, causal=True))
    return near + unfold(across_chunks(lin_q, lin_k, v, packed, causal=True), n)


def _shared(q, tokens):
    """Divides queries by the number of tokens that they read, `[..., 1, 1]`. Queries are narrower than the sums."""
    wide = sum_dtype(q)
    return ops.cast(ops.cast(q, wide) / ops.cast(ops.maximum(tokens, 1), wide), q.dtype)


def mc_tfm_attention_reference(q, k, v, lin_q, lin_k, *, chunk_size, causal=False, padding_mask=None, segment_ids=None):
    """The docstring's two sums, the second as dense `[b, h, i, j]` weights."""
    masks = {"padding_mask": padding_mask, "segment_ids": segment_ids}
    near = diag_attention_reference(q, k, v, chunk_size=chunk_size, causal=causal, **masks)
    n, ids = v.shape[1], documents(padding_mask, segment_ids)
    ids = ops.ones((1, n), "int32") if ids is None else ids
    across = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)  # [b, i, j]
    chunk = ops.arange(n, dtype="int32") // chunk_size
    across = ops.cast(across & (chunk < chunk[:, None]) if causal else across, v.dtype)
    tokens = ops.sum(across, axis=-1, keepdims=True)
    weights = (
        ops.einsum("bihs,bjhs->bhij", lin_q, lin_k) * (across / ops.maximum(tokens, ops.ones_like(tokens)))[:, None]
    )
    return near + ops.einsum("bhij,bjhe->bihe", weights, v)


def initial_state(sizes, case, dtype):
    """State before the first token: constant in n.

    Returns:
      `sum [b, h, s, e]` over finished chunks, float32. `k [b, c, h, s]`, `lin_k` alike and `v [b, c, h, e]`: the open
      chunk; free slots are zero. `position [b]`, int32.
    """
    inside = diag.initial_state(sizes, case, dtype)
    return {**recurrence.initial_state(sizes, case, dtype), **inside, "lin_k": ops.zeros_like(inside["k"])}


def extend(state, q, k, v, lin_q, lin_k, *, chunk_size, valid=None, causal=True):
    """The next k tokens of each row. One token costs O(h (s e + c (s + e))); more take the chunk-parallel form."""
    if not causal:
        raise ValueError("mc_tfm can be streamed only if causal, got causal=False")
    if v.shape[1] == 1:
        return _step(state, q, k, v, lin_q, lin_k, chunk_size, valid)
    position, tokens, c = state["position"], ops.shape(v)[1], chunk_size
    valid = ops.full_like(position, tokens) if valid is None else valid
    fill, until = position % c, position % c + valid
    inside = {name: state[name] for name in ("k", "v", "position")}
    near, inside = diag.extend(inside, q, k, v, chunk_size=c, valid=valid)

    laid = on_grid(state["lin_k"], lin_k, fill, valid)
    keys, values = (fold(x, c) for x in (laid, on_grid(state["v"], v, fill, valid)))
    sums = accumulate.einsum("bgjhs,bgjhe->bghse", keys, values)
    slots = ops.arange(ops.shape(laid)[1], dtype="int32")[None]
    counts = ops.cast((position - fill)[:, None] + slots[:, ::c], state["sum"].dtype)  # [b, g]
    queries = _shared(fold(gather_tokens(lin_q, slots - fill[:, None]), c), counts[..., None, None, None])
    before = ops.cast(state["sum"][:, None] + sum_of_earlier(sums), v.dtype)
    far = unfold(ops.einsum("bgihs,bghse->bgihe", queries, before), ops.shape(slots)[1])
    closed = slots[:, ::c] // c < (until // c)[:, None]  # [b, g]
    total = state["sum"] + ops.sum(zero_outside(sums, closed[..., None, None, None]), axis=1)
    return near + slice_tokens(far, fill, tokens), {**inside, "lin_k": leave_grid(laid, until, c), "sum": total}


def _step(state, q, k, v, lin_q, lin_k, c, valid):
    position, total = state["position"], state["sum"]
    fill = position % c
    near, inside = diag.step(state, q, k, v, chunk_size=c, valid=valid)
    keys = append(state["lin_k"], lin_k, fill, valid)
    counts = ops.cast(position - fill, total.dtype)[:, None, None, None]
    out = near + recurrence.read(total, _shared(lin_q, counts), v.dtype)

    def close(full, total, k, v, lin_k):
        new = accumulate.einsum("bjhs,bjhe->bhse", lin_k, v)
        return total + zero_outside(new, full[:, None, None, None]), *emptied(full, k, v, lin_k)

    full = filled(position, inside["position"], c)
    kept = when_full(full, close, total, inside["k"], inside["v"], keys)
    return out, {**inside, **dict(zip(("sum", "k", "v", "lin_k"), kept, strict=True))}


def state_bytes(sizes, case, itemsize):
    b, h, s, e, c = sizes["b"], sizes["h"], sizes["s"], sizes["e"], case["chunk_size"]
    return b * (4 * h * s * e + itemsize * c * h * (2 * s + e) + 4)


def _flops(sizes, case):
    return diag.SPEC.flops(sizes, case) + recurrence.flops(sizes, case)


SPEC = KernelSpec(
    name="mc_tfm",
    fast=mc_tfm_attention,
    reference=mc_tfm_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe", "lin_q": "bnhs", "lin_k": "bnhs"},
    flops=_flops,
    state_bytes=state_bytes,
    model_chunk=lambda case: case["chunk_size"],
)
