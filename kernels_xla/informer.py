"""Softmax attention of the queries whose scores stand out most; the others get the mean of all values.

Source: Zhou et al., "Informer", arXiv:2012.07436, section 3.1: ProbSparse self-attention.
"""

from keras import ops

from kernels_xla.common.accumulate import einsum, sum_dtype
from kernels_xla.common.landmarks import draws, gathered, numbers, positions_of, real
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.softmax_attention import attend


def informer_attention(
    q: Tensor, k: Tensor, v: Tensor, *, queries: int, seed: int, padding_mask: Tensor | None = None
) -> Tensor:
    """out[i] = softmax attention of token i if M[i] is among the largest of its head, else the mean of v.

    M[i] = max_j q[i] . k[j] / sqrt(s) - sum_j q[i] . k[j] / sqrt(s) / m over a sample of keys j, as in the authors'
    code. m is the number of real tokens. Entry t of the sample is real token `draws(seed)[t]` modulo m, for all queries
    [our rule; the authors draw for each query, which costs a gather of as many keys for each].

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      queries: u, the number of tokens that attend, and of keys in the sample that chooses them.
      seed: Seed of the sample.
      padding_mask: `[b, n]`, True at real tokens.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n u h (s + e)) multiply-adds, O(n u h) memory: linear in n.

    Precision:
      M is computed in float32, so that rounding does not choose a query. The rest is as in `softmax_attention`.
    """
    q, k, v = (real(x, padding_mask) for x in (q, k, v))
    n, count = ops.shape(v)[1], ops.maximum(numbers(v, padding_mask)[1], 1)[:, None]
    chosen = _choose(q, k, count, queries, seed, padding_mask)  # [b, h, u]
    picked = ops.take_along_axis(ops.transpose(q, (0, 2, 1, 3)), ops.minimum(chosen, n - 1)[..., None], axis=2)
    seen = None if padding_mask is None else padding_mask[:, None]
    attended = ops.transpose(attend(ops.transpose(picked, (0, 2, 1, 3)), k, v, seen), (0, 2, 1, 3))  # [b, h, u, e]
    of_token = ops.arange(n, dtype="int32")[:, None] == chosen[:, :, None]  # [b, h, n, u]
    place = ops.cast(ops.argmax(of_token, axis=-1), "int32")[..., None]
    mean = ops.sum(ops.cast(v, sum_dtype(v)), axis=1) / ops.cast(count, sum_dtype(v))[..., None]  # [b, h, e]
    out = ops.where(
        ops.any(of_token, axis=-1)[..., None],
        ops.take_along_axis(attended, place, axis=2),
        ops.cast(mean, v.dtype)[:, :, None],
    )
    return real(ops.transpose(out, (0, 2, 1, 3)), padding_mask)


def _choose(q, k, count, queries, seed, padding_mask):
    """The tokens that attend, int32 `[b, h, u]`. A text of fewer than u tokens also gets indices of n and above."""
    drawn = ops.broadcast_to(ops.convert_to_tensor(draws(seed, queries))[None] % count, (ops.shape(q)[0], queries))
    sample = gathered(k, positions_of(drawn, padding_mask))
    scores = einsum("bihs,bjhs->bhij", ops.stop_gradient(q), ops.stop_gradient(sample)) / q.shape[-1] ** 0.5
    found = ops.max(scores, axis=-1) - ops.sum(scores, axis=-1) / ops.cast(count, scores.dtype)[..., None]
    least = ops.cast(-1e30, found.dtype)
    found = found if padding_mask is None else ops.where(padding_mask[:, None], found, least)
    found = ops.pad(found, [[0, 0], [0, 0], [0, queries]], constant_values=-1e30)  # for a text of fewer tokens
    return ops.cast(ops.top_k(found, queries)[1], "int32")


def informer_attention_reference(q, k, v, *, queries, seed, padding_mask=None):
    """Attention of all tokens. The mean replaces most of the results."""
    (b, n), dtype = v.shape[:2], sum_dtype(v)
    there = ops.ones((b, n), "int32") if padding_mask is None else ops.cast(padding_mask, "int32")
    count, number = ops.maximum(ops.sum(there, axis=1), 1)[:, None], ops.cumsum(there, axis=1) - 1
    sampled = (number[:, None] == (draws(seed, queries)[None] % count)[..., None]) & (there > 0)[:, None]  # [b, u, n]
    often = ops.sum(ops.cast(sampled, dtype), axis=1)[:, None, None]  # a key may be drawn twice
    wide = ops.einsum("bihs,bjhs->bhij", ops.cast(q, dtype), ops.cast(k, dtype)) / q.shape[-1] ** 0.5
    greatest = ops.max(ops.where(often > 0, wide, ops.cast(-1e30, dtype)), axis=-1)
    found = greatest - ops.sum(wide * often, axis=-1) / ops.cast(count, dtype)[..., None]  # [b, h, n]
    ahead = (found[:, :, None] > found[..., None]) & (there > 0)[:, None, None]
    attends = ops.sum(ops.cast(ahead, "int32"), axis=-1) < queries
    scores = ops.einsum("bihs,bjhs->bhij", q, k) / q.shape[-1] ** 0.5
    weights = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True)) * ops.cast(there, v.dtype)[:, None, None]
    total = ops.sum(weights, axis=-1, keepdims=True)
    weights = weights / ops.where(total > 0, total, ops.ones_like(total))
    mean = ops.cast(there[:, None, None] / count[..., None, None], v.dtype)
    return ops.einsum("bhij,bjhe->bihe", ops.where(attends[..., None], weights, mean), v)


def _flops(sizes, case):
    sampled, attended = sizes["s"], sizes["s"] + sizes["e"]
    return 2 * sizes["b"] * sizes["h"] * sizes["n"] * case["queries"] * (sampled + attended)


SPEC = KernelSpec(
    name="informer",
    fast=informer_attention,
    reference=informer_attention_reference,
    stream=None,
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=_flops,
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=("padding_mask",),
)
