"""Combiner, row-major axial: attention to a token's own chunk, and to its column's summary in each other chunk.

Source: Ren et al., "Combiner: Full Attention Transformer with Sparse Computation Cost", arXiv:2107.05768,
Combiner-Axial in row-major order, as in the authors' code. The caller computes the summaries: see
`flash_tf.layers.Combiner`.
"""

from keras import ops

from kernels_xla.common.chunking import fold, unfold
from kernels_xla.common.joint_softmax import joint_attention, joint_attention_reference
from kernels_xla.common.masks import attention_mask, documents
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


def combiner_axial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_sum: Tensor,
    v_sum: Tensor,
    *,
    chunk_size: int,
    causal: bool = False,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
) -> Tensor:
    """Softmax attention to the tokens of the own chunk and to the summaries of the own column, under one normalizer.

    Position i is in chunk i // c and column i % c. It sees the tokens j of its chunk through k and v. In every other
    chunk it sees the token of its column through k_sum and v_sum, which may summarize that whole chunk:

        weights = softmax over both of q[i] . (k[j] or k_sum[j]) / sqrt(s)

    If `causal`, it sees only the tokens j <= i of its chunk, and only the chunks before.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      k_sum: Keys of the summaries, one for each token, `[b, n, h, s]`.
      v_sum: Values of the summaries, `[b, n, h, e]`.
      chunk_size: c, tokens of a chunk. Part of the model: changing it changes the function.
      causal: Whether position i sees only positions j <= i.
      padding_mask: `[b, n]`, True at real tokens. Padding has no summary.
      segment_ids: `[b, n]`, 0 at padding. A token sees its own document only, also in its column. A document that
        starts on a multiple of c gets the same result as alone.
      offset: As in `softmax_attention`.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n (c + n / c) h (s + e)) multiply-adds, O(n (c + n / c) h) memory: between linear and quadratic in n.

    Precision:
      As in `joint_attention`.
    """
    n, ids = ops.shape(v)[1], documents(padding_mask, segment_ids)
    if ids is None and not causal:  # hides the zeros that fill the last chunk
        ids = ops.ones(ops.shape(v)[:2], "int32")
    ids = None if ids is None else fold(ids, chunk_size)  # [b, g, c]
    at = ops.arange(chunk_size, dtype="int32") + offset
    inputs = [fold(x, chunk_size) for x in (q, k, v, k_sum, v_sum)]
    out = joint_attention(
        *inputs, attention_mask(ids, ids, at, at, causal), _columns(ids, ops.shape(inputs[0])[1], causal)
    )
    return unfold(out, n)


def _columns(ids, chunks, causal):
    """Which chunks' summaries the tokens of chunk g see, `[1, g, 1, m]` or `[b, g, c, m]`."""
    at = ops.arange(chunks, dtype="int32")
    others = (at < at[:, None] if causal else at != at[:, None])[None, :, None]
    if ids is None:
        return others
    of_column = ops.transpose(ids, (0, 2, 1))[:, None]  # [b, 1, c, m]
    same = ops.logical_and(ids[..., None] == of_column, of_column > 0)
    return ops.logical_and(same, others)


def combiner_axial_attention_reference(
    q, k, v, k_sum, v_sum, *, chunk_size, causal=False, padding_mask=None, segment_ids=None
):
    """All pairs twice, by tokens and by summaries, with masks for the chunk and for the column."""
    n, ids = v.shape[1], documents(padding_mask, segment_ids)
    ids = ops.ones((1, n), "int32") if ids is None else ids
    at = ops.arange(n, dtype="int32")
    chunk, column = at // chunk_size, at % chunk_size
    document = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)  # [b, i, j]
    order = at[:, None] >= at if causal else at[:, None] >= 0
    near = document & order & (chunk[:, None] == chunk)
    far = document & order & (chunk[:, None] != chunk) & (column[:, None] == column)
    return joint_attention_reference(q, k, v, k_sum, v_sum, near, far)


def initial_state(sizes, case, dtype):
    """State before the first token, with room for `n` tokens a row, rounded up to a multiple of c.

    Returns:
      `k [b, c, h, s]` and `v [b, c, h, e]`: the open chunk; free slots are zero. `k_sum [b, n, h, s]` and
      `v_sum [b, n, h, e]`: the summaries of all tokens. `position [b]`, int32.
    """
    b, h, c = sizes["b"], sizes["h"], case["chunk_size"]
    room = -(-sizes["n"] // c) * c
    shapes = {"k": (c, "s"), "v": (c, "e"), "k_sum": (room, "s"), "v_sum": (room, "e")}
    made = {name: ops.zeros((b, slots, h, sizes[axis]), dtype) for name, (slots, axis) in shapes.items()}
    return {**made, "position": ops.zeros((b,), "int32")}


def step(state, q, k, v, *, chunk_size, valid=None):
    """One token of each row, in O(c + n / c). A chunk that it fills stays open: the caller closes and summarizes it.

    Args:
      state: A state from `initial_state` without a full chunk.
      q: `[b, 1, h, s]`.
      k: `[b, 1, h, s]`.
      v: `[b, 1, h, e]`.
      chunk_size: c.
      valid: int32 `[b]`, 1 at rows whose token is real; None if all are.

    Returns:
      `[b, 1, h, e]`, and the state.
    """
    position, c = state["position"], chunk_size
    fill, chunks = position % c, ops.arange(state["k_sum"].shape[1] // c, dtype="int32")[None]  # [1, m]
    chunk = {name: append(state[name], x, fill, valid) for name, x in (("k", k), ("v", v))}
    column = (gather_tokens(state[name], fill[:, None] + c * chunks)[:, :, None] for name in ("k_sum", "v_sum"))
    near = ops.arange(c, dtype="int32")[None] <= fill[:, None]
    far = chunks < (position // c)[:, None]
    keys = [ops.cast(x, v.dtype) for x in (chunk["k"][:, None], chunk["v"][:, None], *column)]
    out = joint_attention(q[:, None], *keys, near[:, None, None], far[:, None, None])
    return out[:, 0], {**state, **chunk, "position": position + (1 if valid is None else valid)}


def extend(state, q, k, v, k_sum, v_sum, *, chunk_size, valid=None, causal=True):
    """The next k tokens of each row with their summaries, on the row's own grid of chunks."""
    if not causal:
        raise ValueError("combiner_axial can be streamed only if causal, got causal=False")
    position, tokens, c = state["position"], ops.shape(v)[1], chunk_size
    state = {**state, **{n: append(state[n], x, position, valid) for n, x in (("k_sum", k_sum), ("v_sum", v_sum))}}
    if v.shape[1] == 1:
        out, after = step(state, q, k, v, chunk_size=c, valid=valid)
        full = filled(position, after["position"], c)
        return out, {**after, **dict(zip("kv", when_full(full, emptied, after["k"], after["v"]), strict=True))}
    valid = ops.full_like(position, tokens) if valid is None else valid
    fill = position % c
    grid = {name: on_grid(state[name], new, fill, valid) for name, new in (("k", k), ("v", v))}
    slots = ops.arange(ops.shape(grid["v"])[1], dtype="int32")[None]
    at, chunks = (ops.arange(m, dtype="int32") for m in (c, state["k_sum"].shape[1] // c))
    own = (position // c)[:, None] + slots[:, ::c] // c  # [b, g], the number of each chunk of the grid
    inputs = [gather_tokens(q, slots - fill[:, None]), grid["k"], grid["v"], state["k_sum"], state["v_sum"]]
    inputs = [fold(ops.cast(x, v.dtype), c) for x in inputs]
    out = joint_attention(*inputs, attention_mask(None, None, at, at, True), (chunks < own[..., None])[:, :, None])
    out = slice_tokens(unfold(out, ops.shape(slots)[1]), fill, tokens)
    left = {name: leave_grid(x, fill + valid, c) for name, x in grid.items()}
    return out, {**state, **left, "position": position + valid}


def state_bytes(sizes, case, itemsize):
    c = case["chunk_size"]
    slots = c - (-sizes["n"] // c) * c
    return sizes["b"] * (slots * sizes["h"] * (sizes["s"] + sizes["e"]) * itemsize + 4)


def _flops(sizes, case):
    n, c = sizes["n"], case["chunk_size"]
    whole, rest = n // c, n % c
    near = whole * c * c + rest**2  # pairs
    far = rest * (whole + 1) * whole + (c - rest) * whole * (whole - 1)
    return sizes["b"] * sizes["h"] * (1 if case["causal"] else 2) * (near + far) * (sizes["s"] + sizes["e"])


SPEC = KernelSpec(
    name="combiner_axial",
    fast=combiner_axial_attention,
    reference=combiner_axial_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe", "k_sum": "bnhs", "v_sum": "bnhe"},
    flops=_flops,
    state_bytes=state_bytes,
    model_chunk=lambda case: case["chunk_size"],
)
