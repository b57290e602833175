"""A short causal convolution over tokens, for each channel on its own.

Source: Gu and Dao, "Mamba", arXiv:2312.00752, section 3.4. The paper uses four tokens.
"""

from keras import ops

from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.masks import documents, zero_outside
from kernels_xla.common.recurrence import arrived
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.common.streaming import gather_tokens


def convolution(
    x: Tensor,
    weights: Tensor,
    bias: Tensor,
    *,
    causal: bool = True,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """out[i] = bias + sum over k < w of weights[k] * x[i - (w - 1) + k]: the token and w - 1 tokens before it.

    Args:
      x: `[b, n, e]`.
      weights: `[w, e]`. The last row is for the token itself.
      bias: `[e]`.
      causal: Must be True: the window holds no later tokens.
      padding_mask: `[b, n]`, True at real tokens. Padding is read as zeros. Inside a text it takes a place in the
        window, as it takes a position.
      segment_ids: `[b, n]`, 0 at padding. A document sees zeros before its start.

    Returns:
      `[b, n, e]`, in the dtype of `x`; 0 at padding.

    Raises:
      ValueError: `causal` is False.

    Cost:
      O(n w e) multiply-adds, O(n e) memory.

    Precision:
      Products and sums are float32.
    """
    _check(causal)
    ids = documents(padding_mask, segment_ids)
    real = None if ids is None else (ids > 0)[..., None]
    before = [[0, 0], [weights.shape[0] - 1, 0]]
    seen = None if segment_ids is None else (ops.pad(ids, before), ids)
    return zero_outside(_slide(ops.pad(zero_outside(x, real), [*before, [0, 0]]), weights, bias, seen), real)


def _check(causal):
    if not causal:
        raise ValueError("convolution is causal by definition: it needs causal=True, got False")


def _slide(x, weights, bias, seen=None):
    """The sums for x `[b, w - 1 + n, e]`: `[b, n, e]`. `seen` has the documents of x and of its last n tokens."""
    w, dtype = weights.shape[0], x.dtype
    n = ops.shape(x)[1] - (w - 1)
    x, weights, bias = (ops.cast(part, sum_dtype(x)) for part in (x, weights, bias))
    out = bias
    for k in range(w):
        part = x[:, k : k + n]
        out = out + weights[k] * (
            part if seen is None else zero_outside(part, (seen[0][:, k : k + n] == seen[1])[..., None])
        )
    return ops.cast(out, dtype)


def convolution_reference(x, weights, bias, *, causal=True, padding_mask=None, segment_ids=None):
    """The sum over dense weights of pairs, `[b, i, j, e]`."""
    del causal
    n, w = x.shape[1], weights.shape[0]
    ids = documents(padding_mask, segment_ids)
    ids = ops.ones(x.shape[:2], "int32") if ids is None else ids
    back = ops.arange(n, dtype="int32")[:, None] - ops.arange(n, dtype="int32")[None, :]  # how far j is before i
    inside = (back >= 0) & (back < w)
    seen = inside & (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    of_pairs = ops.take(weights, ops.clip(w - 1 - back, 0, w - 1), axis=0)  # [i, j, e]
    of_pairs = of_pairs * ops.cast(seen, x.dtype)[..., None]
    return (ops.einsum("bije,bje->bie", of_pairs, x) + bias) * ops.cast(ids > 0, x.dtype)[..., None]


def initial_state(sizes, case, dtype):
    """The last w - 1 tokens, `tokens [b, w - 1, e]`: zeros."""
    del case
    return {"tokens": ops.zeros((sizes["b"], sizes["w"] - 1, sizes["e"]), dtype)}


def extend(state, x, weights, bias, *, valid=None, causal=True):
    """The next k tokens of each row."""
    _check(causal)
    before, k = state["tokens"], ops.shape(x)[1]
    real = arrived(k, valid)
    x = x if real is None else zero_outside(x, real[..., None])
    both = ops.concatenate([before, ops.cast(x, before.dtype)], axis=1)
    at = ops.arange(before.shape[1], dtype="int32")[None]
    after = both[:, k:] if valid is None else gather_tokens(both, valid[:, None] + at)
    return ops.cast(_slide(both, weights, bias), x.dtype), {"tokens": after}


def state_bytes(sizes, case, itemsize):
    del case
    return sizes["b"] * (sizes["w"] - 1) * sizes["e"] * itemsize


SPEC = KernelSpec(
    name="convolution",
    fast=convolution,
    reference=convolution_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: True),
    inputs={"x": "bne", "weights": "we", "bias": "e"},
    flops=lambda sizes, case: 2 * sizes["b"] * sizes["n"] * sizes["w"] * sizes["e"],
    state_bytes=state_bytes,
)
