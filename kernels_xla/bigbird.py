"""Softmax attention of blocks to their neighbours, to the first and last block, and to a few random blocks.

Source: Zaheer et al., "Big Bird", arXiv:2007.14062, section 2, in blocks as in its appendix D. The global
blocks are blocks of the text itself.
"""

import numpy as np
from keras import ops

from kernels_xla.common.chunking import fold, unfold
from kernels_xla.common.landmarks import draws, gathered, real
from kernels_xla.common.spec import KernelSpec, Tensor
from kernels_xla.softmax_attention import attend

PERIOD = 1024  # number of blocks after which the random blocks repeat


def bigbird_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    random_blocks: int,
    seed: int,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention where block a sees block x if x is a - 1, a, a + 1, the first, the last, or drawn for a.

    The first and the last block see all. The last block is the block of the last real token. With g blocks up to it,
    the t-th block drawn for block a is `draws(seed)[a, t]` modulo g [our rule: a drawn block that is visible already
    counts once; the authors draw among the others].

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      chunk_size: c, tokens of a block. Part of the model: changing it changes the function.
      random_blocks: Number of blocks drawn for each block.
      seed: Seed of the drawn blocks.
      padding_mask: `[b, n]`, True at real tokens.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n c h (s + e)) multiply-adds and O(n c h) memory for each of 7 + `random_blocks` blocks: linear in n.

    Precision:
      As in `softmax_attention`.
    """
    (b, n), c = ops.shape(v)[:2], chunk_size
    there = ops.ones((b, n), "bool") if padding_mask is None else padding_mask
    q, k, v = (fold(real(x, padding_mask), c) for x in (q, k, v))
    there = fold(ops.cast(there, "int32"), c)  # [b, g, c]
    g = ops.shape(v)[1]
    at = ops.arange(g, dtype="int32")
    last = ops.max(ops.max(there, axis=-1) * at, axis=-1)[:, None]  # [b, 1]
    blocks, first_time = _blocks(at, last, random_blocks, seed)  # [b, g, t]
    keys, values = (_gathered(x, blocks) for x in (k, v))  # [b g, t c, h, s]
    seen = gathered(there, ops.reshape(blocks, (b, -1)))  # [b, g t, c]
    seen = ops.logical_and(ops.reshape(seen > 0, (b, g, -1, c)), first_time[..., None])
    out = attend(_flat(q), keys, values, ops.reshape(seen, (b * g, 1, blocks.shape[-1] * c)))
    out = ops.reshape(out, ops.shape(v))
    everywhere = ops.reshape(there > 0, (b, 1, -1))
    for end in (last * 0, last):
        seeing_all = attend(_rows(q, end), _whole(k), _whole(v), everywhere)  # [b, c, h, e]
        out = ops.where((at == end)[..., None, None, None], seeing_all[:, None], out)
    return real(unfold(out, n), padding_mask)


def _blocks(at, last, random_blocks, seed):
    """The visible blocks of each block, int32 `[b, g, t]`, and a mask: in the text, and not listed before."""
    count = last[..., None] + 1  # [b, 1, 1]
    own = at[None, :, None]
    drawn = ops.convert_to_tensor(draws(seed, PERIOD * random_blocks).reshape(PERIOD, -1))
    drawn = ops.take(drawn, at % PERIOD, axis=0)  # [g, random_blocks]
    parts = [own - 1, own, own + 1, last[..., None] * 0, last[..., None], drawn[None] % count]
    shape = (*ops.shape(last)[:1], *ops.shape(at))
    found = ops.concatenate([ops.broadcast_to(part, (*shape, part.shape[-1])) for part in parts], axis=-1)
    earlier = np.tri(found.shape[-1], k=-1, dtype=bool)
    named = ops.any(ops.logical_and(found[..., None] == found[..., None, :], earlier), axis=-1)
    inside = ops.logical_and(found >= 0, found < count)
    return found, ops.logical_and(inside, ops.logical_not(named))


def _flat(x):
    """`[b, g, c, ...]` -> `[b g, c, ...]`."""
    return ops.reshape(x, (-1, *ops.shape(x)[2:]))


def _whole(x):
    """`[b, g, c, ...]` -> `[b, g c, ...]`."""
    return ops.reshape(x, (ops.shape(x)[0], -1, *ops.shape(x)[3:]))


def _rows(x, block):
    """`[b, g, c, ...]`, int32 `[b, 1]` -> `[b, c, ...]`."""
    return gathered(x, block)[:, 0]


def _gathered(x, blocks):
    """`[b, g, c, h, s]`, int32 `[b, g, t]` -> `[b g, t c, h, s]`."""
    shape = ops.shape(x)
    found = gathered(x, ops.reshape(blocks, (shape[0], -1)))  # [b, g t, c, h, s]
    return ops.reshape(found, (shape[0] * shape[1], blocks.shape[-1] * shape[2], *shape[3:]))


def bigbird_attention_reference(q, k, v, *, chunk_size, random_blocks, seed, padding_mask=None):
    """Attention over all pairs, with a mask of the pairs whose blocks see each other."""
    b, n = v.shape[:2]
    there = ops.ones((b, n), "bool") if padding_mask is None else padding_mask
    block = ops.arange(n, dtype="int32") // chunk_size
    query, key = block[:, None], block[None]
    last = ops.max(ops.cast(there, "int32") * block, axis=1)[:, None, None]
    drawn = draws(seed, PERIOD * random_blocks).reshape(PERIOD, -1)
    drawn = ops.take(drawn, block % PERIOD, axis=0)[None] % (last + 1)  # [b, n, random_blocks]
    seen = (ops.abs(query - key) <= 1) | (query == 0) | (key == 0) | (query == last) | (key == last)
    seen = (seen | ops.any(drawn[..., None] == block, axis=2)) & there[:, None]
    scores = ops.einsum("bihs,bjhs->bhij", q, k) / q.shape[-1] ** 0.5
    weights = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True)) * ops.cast(seen[:, None], v.dtype)
    total = ops.sum(weights, axis=-1, keepdims=True)
    return ops.einsum("bhij,bjhe->bihe", weights / ops.where(total > 0, total, ops.ones_like(total)), v)


def _flops(sizes, case):
    blocks = -(-sizes["n"] // case["chunk_size"])
    seen = blocks * (5 + case["random_blocks"]) + 2 * blocks  # by all blocks, and by the two ends
    return 2 * sizes["b"] * sizes["h"] * seen * case["chunk_size"] ** 2 * (sizes["s"] + sizes["e"])


SPEC = KernelSpec(
    name="bigbird",
    fast=bigbird_attention,
    reference=bigbird_attention_reference,
    stream=None,
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=_flops,
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=("padding_mask",),
)
