"""Softmax attention to a window of tokens and to a few weighted sums over the text, which gives the weights.

Source: Zhu et al., "Long-Short Transformer", arXiv:2107.02192, sections 3.1 to 3.3, for masked models. The form for
causal models is `transformer_ls_causal`.
"""

from keras import ops

from kernels_xla.common.accumulate import einsum, sum_dtype
from kernels_xla.common.chunking import fold, unfold
from kernels_xla.common.landmarks import real
from kernels_xla.common.masks import zero_outside
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.softmax_attention import attend

EPSILON = 1e-5


def transformer_ls_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    k_scale: Tensor,
    k_offset: Tensor,
    v_scale: Tensor,
    v_offset: Tensor,
    *,
    chunk_size: int,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """out[i] = one softmax of q[i] . key / sqrt(s) over the tokens of a window and r sums, for each head.

    The window of a block of c tokens is the block, half a block before it, and half a block after it. P is the softmax
    of `scores` over the tokens. The sums have the keys norm(P^T k) and the values norm(P^T v). These layer norms are
    taken over all heads together and give the sums the size of tokens.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      scores: Score of each token in each sum, `[b, n, h, r]`.
      k_scale: Scale of the norm of keys, `[h, s]`.
      k_offset: Offset of the norm of keys, `[h, s]`.
      v_scale: Scale of the norm of values, `[h, e]`.
      v_offset: Offset of the norm of values, `[h, e]`.
      chunk_size: c, even. Part of the model: changing it changes the function.
      padding_mask: `[b, n]`, True at real tokens.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n (c + r) h (s + e)) multiply-adds, O(n (c + r) h) memory: linear in n.

    Precision:
      P, the sums and their norms are float32. P is rounded to the dtype of `v` before it sums. The rest is as in
      `softmax_attention`.
    """
    shape = ops.shape(v)
    there = ops.ones(shape[:2], "bool") if padding_mask is None else padding_mask
    q, k, v = (real(x, padding_mask) for x in (q, k, v))
    whole = (x[:, None] for x in (scores, there, k, v))  # the text is one segment
    keys, values = sums(*whole, k_scale, k_offset, v_scale, v_offset)  # [b, 1, r, h, s]
    near = [_window(fold(x, chunk_size)) for x in (k, v, ops.cast(there, "int32"))]  # [b, g, 2c, ...]
    g, r = ops.shape(near[0])[1], scores.shape[-1]
    join = lambda far, near: _flat(ops.concatenate([_copied(far, g), near], axis=2))  # noqa: E731
    both = join(keys, near[0]), join(values, near[1])  # [b g, r + 2c, h, s]
    seen = _flat(ops.concatenate([ops.ones((shape[0], g, r), "bool"), near[2] > 0], axis=2))[:, None]
    out = ops.reshape(attend(_flat(fold(q, chunk_size)), *both, seen), (shape[0], g, chunk_size, *shape[2:]))
    return real(unfold(out, shape[1]), padding_mask)


def sums(scores: Tensor, seen: Tensor | None, k: Tensor, v: Tensor, *norm: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of the sums of each segment, over its tokens that are `seen`.

    Args:
      scores: `[b, g, c, h, r]`.
      seen: Bool `[b, g, c]`, where b is 1 if all rows are alike; None for all tokens.
      k: `[b, g, c, h, s]`.
      v: `[b, g, c, h, e]`.
      *norm: `k_scale`, `k_offset`, `v_scale` and `v_offset`, as in `transformer_ls_attention`.

    Returns:
      `[b, g, r, h, s]` and `[b, g, r, h, e]`, in the dtype of `v`.
    """
    seen = None if seen is None else seen[..., None, None]
    wide = ops.cast(scores, sum_dtype(scores))
    share = ops.softmax(wide if seen is None else ops.where(seen, wide, -1e30), axis=2)
    share = ops.cast(zero_outside(share, seen), v.dtype)
    keys = _norm(einsum("bgjhr,bgjhs->bgrhs", share, k), *norm[:2])
    values = _norm(einsum("bgjhr,bgjhe->bgrhe", share, v), *norm[2:])
    return ops.cast(keys, v.dtype), ops.cast(values, v.dtype)


def _norm(x, scale, offset):
    """Layer norm of `[b, g, r, h, s]` over heads and their channels."""
    mean = ops.mean(x, axis=(3, 4), keepdims=True)
    variance = ops.mean(ops.square(x - mean), axis=(3, 4), keepdims=True)
    return (x - mean) * ops.rsqrt(variance + EPSILON) * ops.cast(scale, x.dtype) + ops.cast(offset, x.dtype)


def _window(x):
    """`[b, g, c, ...]` -> `[b, g, 2c, ...]`: each block between its neighbours' halves, zeros beyond the ends."""
    half = x.shape[2] // 2
    rest = [[0, 0]] * (len(x.shape) - 2)
    before = ops.pad(x[:, :-1, half:], [[0, 0], [1, 0], *rest])
    after = ops.pad(x[:, 1:, :half], [[0, 0], [0, 1], *rest])
    return ops.concatenate([before, x, after], axis=2)


def _copied(x, g):
    """`[b, 1, r, ...]` -> `[b, g, r, ...]`."""
    return ops.broadcast_to(x, (ops.shape(x)[0], g, *ops.shape(x)[2:]))


def _flat(x):
    """`[b, g, ...]` -> `[b g, ...]`."""
    return ops.reshape(x, (-1, *ops.shape(x)[2:]))


def transformer_ls_attention_reference(
    q, k, v, scores, k_scale, k_offset, v_scale, v_offset, *, chunk_size, padding_mask=None
):
    """All pairs with the window as a mask, beside the sums."""
    (b, n), c, dtype = v.shape[:2], chunk_size, v.dtype
    there = ops.ones((b, n), dtype) if padding_mask is None else ops.cast(padding_mask, dtype)
    share = ops.exp(scores - ops.max(scores, axis=1, keepdims=True)) * there[..., None, None]
    total = ops.sum(share, axis=1, keepdims=True)
    share = share / ops.where(total > 0, total, ops.ones_like(total))

    def summed(x, scale, offset):
        found = ops.einsum("bnhr,bnhs->brhs", share, x)
        mean = ops.mean(found, axis=(2, 3), keepdims=True)
        deviation = ops.sqrt(ops.mean((found - mean) ** 2, axis=(2, 3), keepdims=True) + EPSILON)
        return (found - mean) / deviation * scale + offset

    keys = ops.concatenate([k, summed(k, k_scale, k_offset)], axis=1)
    values = ops.concatenate([v, summed(v, v_scale, v_offset)], axis=1)
    at, block = ops.arange(n, dtype="int32"), ops.arange(n, dtype="int32")[:, None] // c
    window = (at >= block * c - c // 2) & (at < block * c + c + c // 2)  # [i, j]
    near = ops.cast(window, dtype) * there[:, None]
    seen = ops.concatenate([near, ops.ones((b, n, scores.shape[-1]), dtype)], axis=-1) * there[..., None]
    found = ops.einsum("bihs,bjhs->bhij", q, keys) / q.shape[-1] ** 0.5
    weights = ops.exp(found - ops.max(found, axis=-1, keepdims=True)) * seen[:, None]
    total = ops.sum(weights, axis=-1, keepdims=True)
    return ops.einsum("bhij,bjhe->bihe", weights / ops.where(total > 0, total, ops.ones_like(total)), values)


def _flops(sizes, case):
    n, c, r = sizes["n"], case["chunk_size"], sizes["r"]
    seen = -(-n // c) * c * (2 * c + r) + n * r  # by all tokens, and what makes the sums
    return 2 * sizes["b"] * sizes["h"] * seen * (sizes["s"] + sizes["e"])


SPEC = KernelSpec(
    name="transformer_ls",
    fast=transformer_ls_attention,
    reference=transformer_ls_attention_reference,
    stream=None,
    inputs={
        "q": "bnhs", "k": "bnhs", "v": "bnhe", "scores": "bnhr",
        "k_scale": "hs", "k_offset": "hs", "v_scale": "he", "v_offset": "he",
    },
    flops=_flops,
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=("padding_mask",),
)  # fmt: skip
