"""Attention inside blocks: a token sees only its own block.

Source: Qin et al., "The Devil in Linear Transformer" (TransNormer), arXiv:2210.10340, DiagAttention in section 4.2.
The weights are softmax (T2) or ReLU (T1, after ReLA, arXiv:2104.07012). ReLU weights are not divided by their sum,
because a norm follows.
"""

from collections.abc import Callable
from typing import Literal

from keras import ops

from kernels_xla.common.chunking import fold, unfold
from kernels_xla.common.masks import attention_mask, documents, zero_outside
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.common.streaming import (
    append,
    emptied,
    filled,
    gather_tokens,
    leave_grid,
    on_grid,
    runtime_zero,
    slice_tokens,
    when_full,
)
from kernels_xla.softmax_attention import attend, softmax_attention_reference


def diag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int,
    causal: bool = False,
    weights: Literal["softmax", "relu"] = "softmax",
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """out[i] = sum over visible j of w(q[i] . k[j] / sqrt(s)) v[j], where i // c = j // c, for each head.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      chunk_size: c, tokens of a block. Part of the model: changing it changes the function.
      causal: Whether position i sees only positions j <= i.
      weights: w: "softmax", over the visible tokens, or "relu".
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; a token sees its own document only. A document that starts on a multiple of c
        gets the same result as alone.
      offset: As in `softmax_attention`.
      dropout: As in `softmax_attention`.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n c h (s + e)) multiply-adds, O(n c h) memory: linear in n.

    Precision:
      As in `softmax_attention`. With "relu", products are in the dtype of the inputs.
    """
    n, ids = ops.shape(v)[1], documents(padding_mask, segment_ids)
    if ids is None:  # hides the zeros that fill the last block
        ids = ops.ones(ops.shape(v)[:2], "int32") if not causal else None
    folded = [_as_rows(fold(x, chunk_size)) for x in (q, k, v)]
    ids = None if ids is None else _as_rows(fold(ids, chunk_size))
    out = _attend(*folded, ids, causal, weights, offset, dropout)
    return unfold(ops.reshape(out, (ops.shape(v)[0], (n + chunk_size - 1) // chunk_size, *ops.shape(out)[1:])), n)


def _as_rows(x):
    """`[b, g, c, ...]` -> `[b g, c, ...]`."""
    return ops.reshape(x, (-1, *ops.shape(x)[2:]))


def _attend(q, k, v, ids, causal, weights, offset, dropout):
    """Attention inside each row: q, k `[b, c, h, s]`, v `[b, c, h, e]`, ids `[b, c]` or None -> `[b, c, h, e]`."""
    at = ops.arange(ops.shape(q)[1], dtype="int32") + offset
    v = v if ids is None else zero_outside(v, (ids > 0)[..., None, None])
    return _weighted(q, k, v, attention_mask(ids, ids, at, at, causal), weights, dropout)


def _weighted(q, k, v, seen, weights, dropout=None):
    """Attention: q `[b, i, h, s]`, k `[b, j, h, s]`, v `[b, j, h, e]`, seen `[i, j]`, `[b, i, j]` -> `[b, i, h, e]`."""
    if weights == "softmax":
        return attend(q, k, v, seen, dropout)
    seen = seen if len(seen.shape) == 2 else seen[:, None]
    scores = ops.einsum("bihs,bjhs->bhij", q * ops.cast(q.shape[-1] ** -0.5, q.dtype), k)
    relu = zero_outside(ops.relu(scores), seen)
    return ops.einsum("bhij,bjhe->bihe", relu if dropout is None else dropout(relu), v)


def diag_attention_reference(
    q, k, v, *, chunk_size, causal=False, weights="softmax", padding_mask=None, segment_ids=None
):
    """Attention over all pairs, with a mask of the pairs in one block."""
    n, ids = v.shape[1], documents(padding_mask, segment_ids)
    ids = ops.ones((1, n), "int32") if ids is None else ids
    block = ops.arange(n, dtype="int32") // chunk_size
    # One number for block and document: tokens that differ in either are in different documents.
    both = ops.cast(ids > 0, "int32") * (ids * (n + 1) + block + 1)
    both = ops.broadcast_to(both, (v.shape[0], n))
    if weights == "softmax":
        return softmax_attention_reference(q, k, v, causal=causal, segment_ids=both)
    seen = (both[:, :, None] == both[:, None, :]) & (both[:, None, :] > 0)
    seen = ops.tril(seen) if causal else seen
    scores = ops.relu(ops.einsum("bihs,bjhs->bhij", q, k) / q.shape[-1] ** 0.5)
    return ops.einsum("bhij,bjhe->bihe", scores * ops.cast(seen[:, None], v.dtype), v)


def initial_state(sizes, case, dtype):
    """State before the first token: constant in n.

    Returns:
      `k [b, c, h, s]` and `v [b, c, h, e]`: the open block; free slots are zero. `position [b]`, int32.
    """
    b, h, c = sizes["b"], sizes["h"], case["chunk_size"]
    buffers = {name: ops.zeros((b, c, h, sizes[axis]), dtype) for name, axis in (("k", "s"), ("v", "e"))}
    return {**buffers, "position": ops.zeros((b,), "int32")}


def step(state, q, k, v, *, chunk_size, valid=None, weights="softmax"):
    """One token of each row, `[b, 1, h, .]`, in O(c h (s + e)). Full blocks stay open; `extend` empties them."""
    position = state["position"]
    fill = position % chunk_size
    chunk = {name: append(state[name], x, fill, valid) for name, x in (("k", k), ("v", v))}
    seen = ops.arange(chunk_size, dtype="int32") <= fill[:, None]  # [b, c]
    out = _weighted(q, *(ops.cast(x, v.dtype) for x in chunk.values()), seen[:, None], weights)
    return out, {**chunk, "position": position + (1 if valid is None else valid)}


def extend(state, q, k, v, *, chunk_size, valid=None, causal=True, weights="softmax"):
    """The next k tokens of each row, on the row's own grid of blocks. A single token reads only its open block."""
    if not causal:
        raise ValueError("diag_attention can be streamed only if causal, got causal=False")
    position, tokens, c = state["position"], ops.shape(v)[1], chunk_size
    if v.shape[1] == 1:
        out, after = step(state, q, k, v, chunk_size=c, valid=valid, weights=weights)
        full = filled(position, after["position"], c)
        return out, {**after, **dict(zip("kv", when_full(full, emptied, after["k"], after["v"]), strict=True))}
    valid = ops.full_like(position, tokens) if valid is None else valid
    fill = position % c
    grid = {name: on_grid(state[name], new, fill, valid) for name, new in (("k", k), ("v", v))}
    slots = ops.arange(ops.shape(grid["v"])[1], dtype="int32")[None]
    out = diag_attention(
        gather_tokens(q, slots - fill[:, None]),
        *(ops.cast(grid[name], v.dtype) for name in ("k", "v")),
        chunk_size=c,
        causal=True,
        weights=weights,
        offset=runtime_zero(position),
    )
    left = {name: leave_grid(x, fill + valid, c) for name, x in grid.items()}
    return slice_tokens(out, fill, tokens), {**left, "position": position + valid}


def state_bytes(sizes, case, itemsize):
    return sizes["b"] * (case["chunk_size"] * sizes["h"] * (sizes["s"] + sizes["e"]) * itemsize + 4)


def _flops(sizes, case):
    n, c = sizes["n"], case["chunk_size"]
    inside = n // c * c * c + (n % c) ** 2  # pairs
    return sizes["b"] * sizes["h"] * (1 if case["causal"] else 2) * inside * (sizes["s"] + sizes["e"])


SPEC = KernelSpec(
    name="diag_attention",
    fast=diag_attention,
    reference=diag_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=_flops,
    state_bytes=state_bytes,
    model_chunk=lambda case: case["chunk_size"],
)
