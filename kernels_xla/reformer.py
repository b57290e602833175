"""Softmax attention among tokens that hashing puts next to each other.

Source: Kitaev et al., "Reformer", arXiv:2001.04451, section 2, in the form of its public implementations: a token sees
its chunk of the sorted text and the chunk before it.
"""

import numpy as np
from keras import ops

from kernels_xla.common.accumulate import einsum, sum_dtype
from kernels_xla.common.chunking import fold, unfold
from kernels_xla.common.landmarks import gathered, real
from kernels_xla.common.masks import zero_outside
from kernels_xla.common.spec import KernelSpec, Tensor

ALONE = -1e5  # score of a token with itself, from the public implementations: it counts only if the token sees no other


def reformer_attention(
    q: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    buckets: int,
    rounds: int,
    seed: int,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Attention in several rounds of hashing, weighted by the softmax over rounds of log Z, for each head.

    Each round sorts the tokens by bucket, then by position, and cuts them into chunks. A token attends to its chunk and
    to the chunk before with weights exp(q[i] . k[j]) / Z, where k[j] = q[j] / |q[j]|. It attends to itself only if it
    sees no other token. The first chunk has none before it [public implementations take the last chunk there]. The
    bucket is the index of the largest number of q R and -q R. R, `[s, buckets / 2]`, is normal and drawn for each round
    from `seed`.

    Args:
      q: Queries, which also give the keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      chunk_size: c, tokens of a chunk. Part of the model: changing it changes the function.
      buckets: Number of buckets, even.
      rounds: Number of rounds of hashing.
      seed: Seed of the rotations R.
      padding_mask: `[b, n]`, True at real tokens. Padding is sorted behind them.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(rounds n h (c (s + e) + s buckets)) multiply-adds, O(rounds n c h) memory, and a sort: n log n.

    Precision:
      Hashes are computed in float32, so that rounding does not choose a bucket. Scores and softmax are float32. Weights
      enter their product in the dtype of `v`.
    """
    q, v = real(q, padding_mask), real(v, padding_mask)
    b, n, h, _ = ops.shape(v)
    there = ops.ones((b, n), "bool") if padding_mask is None else padding_mask
    order = ops.argsort(_keys(q, there, buckets, rounds, seed), axis=-1)  # [b, h, rounds, n]
    order = ops.cast(ops.reshape(order, (-1, n)), "int32")
    k = q * ops.cast(_over_length(q), q.dtype)
    sorted_ = [fold(gathered(_rows(x, rounds), order), chunk_size) for x in (q, k, v)]  # [b h rounds, g, c, s]
    known = ops.repeat(there, h * rounds, axis=0)
    number = ops.arange(n, dtype="int32")[None] + 1  # 0 is the padding that fills the last chunk
    seen = fold(gathered(ops.where(known, number, 0), order), chunk_size)  # [b h rounds, g, c]
    out, total = _attend(*sorted_, seen)
    back = ops.cast(ops.argsort(order, axis=-1), "int32")
    out = ops.reshape(gathered(unfold(out, n), back), (b, h, rounds, n, -1))
    total = ops.reshape(gathered(unfold(total, n), back), (b, h, rounds, n, 1))
    out = ops.sum(ops.softmax(total, axis=2) * ops.cast(out, total.dtype), axis=2)
    return real(ops.cast(ops.transpose(out, (0, 2, 1, 3)), v.dtype), padding_mask)


def rotations(width: int, buckets: int, rounds: int, seed: int) -> np.ndarray:
    """R for each round, `[s, rounds, buckets / 2]`."""
    return np.random.default_rng(seed).normal(size=(width, rounds, buckets // 2))


def _keys(q, there, buckets, rounds, seed):
    """The sort keys of the tokens, all different, int32 `[b, h, rounds, n]`."""
    n, dtype = ops.shape(q)[1], sum_dtype(q)
    drawn = ops.cast(rotations(q.shape[-1], buckets, rounds, seed), dtype)
    turned = einsum("bnhs,srk->bhrnk", ops.cast(ops.stop_gradient(q), dtype), drawn)
    bucket = ops.cast(ops.argmax(ops.concatenate([turned, -turned], axis=-1), axis=-1), "int32")
    return ops.where(there[:, None, None], bucket, buckets) * n + ops.arange(n, dtype="int32")


def _over_length(q):
    """1 / |q| for each token and head, `[b, n, h, 1]`, in float32."""
    square = ops.sum(ops.square(ops.cast(q, sum_dtype(q))), axis=-1, keepdims=True)
    return ops.rsqrt(square + 1e-6 * q.shape[-1])


def _rows(x, rounds):
    """`[b, n, h, s]` -> `[b h rounds, n, s]`, the same in all rounds."""
    b, n, h, s = ops.shape(x)
    x = ops.broadcast_to(ops.transpose(x, (0, 2, 1, 3))[:, :, None], (b, h, rounds, n, s))
    return ops.reshape(x, (-1, n, s))


def _attend(q, k, v, number):
    """Attention of each chunk to itself and the chunk before.

    Args:
      q: `[m, g, c, s]`.
      k: `[m, g, c, s]`.
      v: `[m, g, c, e]`.
      number: A number for each token, int32 `[m, g, c]`, 0 at padding.

    Returns:
      `[m, g, c, e]`, and log Z, `[m, g, c, 1]`.
    """
    k, v, other = (ops.concatenate([_before(x), x], axis=2) for x in (k, v, number))
    scores = einsum("mgis,mgjs->mgij", q, k)
    scores = ops.where(number[..., None] == other[:, :, None], ops.cast(ALONE, scores.dtype), scores)
    seen = (other > 0)[:, :, None]
    scores = ops.where(seen, scores, ops.cast(-1e30, scores.dtype))
    total = ops.logsumexp(scores, axis=-1, keepdims=True)
    weights = zero_outside(ops.exp(scores - total), seen)
    return ops.einsum("mgij,mgje->mgie", ops.cast(weights, v.dtype), v), total


def _before(x):
    """The chunk before each, `[m, g, ...]`; zeros before the first."""
    return ops.pad(x[:, :-1], [[0, 0], [1, 0], *[[0, 0]] * (len(x.shape) - 2)])


def reformer_attention_reference(q, v, *, chunk_size, buckets, rounds, seed, padding_mask=None):
    """All pairs in each round; a token's place in the sorted text is the number of tokens before it."""
    b, n = v.shape[:2]
    there = ops.ones((b, n), "bool") if padding_mask is None else padding_mask
    keys = _keys(q, there, buckets, rounds, seed)  # [b, h, rounds, n]
    place = ops.sum(ops.cast(keys[..., None, :] < keys[..., None], "int32"), axis=-1)
    apart = place[..., None] // chunk_size - place[..., None, :] // chunk_size
    seen = (apart >= 0) & (apart <= 1) & there[:, None, None, None]
    k = q / ops.sqrt(ops.sum(q**2, axis=-1, keepdims=True) + 1e-6 * q.shape[-1])
    scores = ops.einsum("bihs,bjhs->bhij", q, k)
    scores = ops.where(ops.eye(n, dtype="bool"), ops.cast(ALONE, scores.dtype), scores)[:, :, None]
    scores = ops.where(seen, scores, ops.cast(-1e30, scores.dtype))
    greatest = ops.max(scores, axis=-1, keepdims=True)
    weights = ops.exp(scores - greatest) * ops.cast(seen, v.dtype)  # [b, h, rounds, i, j]
    total = ops.sum(weights, axis=-1, keepdims=True)
    total = ops.where(total > 0, total, ops.ones_like(total))
    share = ops.softmax(greatest + ops.log(total), axis=2)
    return ops.einsum("bhrij,bjhe->bihe", share * weights / total, v)


def _flops(sizes, case):
    chunks = -(-sizes["n"] // case["chunk_size"])
    pairs = 2 * chunks * case["chunk_size"] ** 2
    hashes = sizes["n"] * sizes["s"] * (case["buckets"] // 2)
    return 2 * sizes["b"] * sizes["h"] * case["rounds"] * (pairs * (sizes["s"] + sizes["e"]) + hashes)


SPEC = KernelSpec(
    name="reformer",
    fast=reformer_attention,
    reference=reformer_attention_reference,
    stream=None,
    inputs={"q": "bnhs", "v": "bnhe"},
    flops=_flops,
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=("padding_mask",),
)
