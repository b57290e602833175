"""Multi-head softmax attention, the baseline of every linear form.

Source: Vaswani et al., "Attention Is All You Need", equation 1.
"""

from collections.abc import Callable

from keras import ops

from kernels_xla.common import accelerator, accumulate, cudnn
from kernels_xla.common.masks import attention_mask, documents, strips, zero_outside
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.common.streaming import append

STRIP = 256  # least tokens of a strip of queries: as fast as whole rows of 512 on a GPU, and faster above


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Softmax attention: out[i] = sum over visible j of softmax_j(q[i] . k[j] / sqrt(s)) v[j], for each head.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      causal: Whether position i sees only positions j <= i.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; a token sees its own document only.
      offset: Added to the positions that the mask compares, which changes nothing. A zero that is known only at run
        time keeps the compiler from storing the mask in the program.
      dropout: Sets random numbers to 0 and scales the others, as Keras' `Dropout`. It acts on the weights.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n^2 h (s + e)) multiply-adds, O(n^2 h) memory. It takes O(n h (s + e)) memory where cuDNN has one kernel for it:
      on a GPU, in 16 bits, without other masks than `causal` and with e = s.

    Precision:
      Scores and softmax are float32. The weights, and the gradients of the scores, enter their products in the dtype of
      the inputs.
    """
    plain = padding_mask is None and segment_ids is None and dropout is None and q.shape == k.shape == v.shape
    if plain and accelerator.fuses_attention(tuple(v.shape), v.dtype):
        return cudnn.attention(q, k, v, causal)
    at, ids = ops.arange(ops.shape(q)[1], dtype="int32") + offset, documents(padding_mask, segment_ids)
    out = [attend(q[:, i], k[:, j], v[:, j], seen, dropout) for i, j, seen in strips(ids, at, causal, STRIP)]
    return ops.concatenate(out, axis=1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Attention of any queries to any keys, over the pairs `seen`.

    Args:
      q: `[b, i, h, s]`.
      k: `[b, j, h, s]`.
      v: `[b, j, h, e]`.
      seen: Bool `[i, j]` or `[b, i, j]`, where i is 1 if all queries see the same keys; None for all pairs.
      dropout: As in `softmax_attention`.

    Returns:
      `[b, i, h, e]`, in the dtype of `v`; 0 for a query that sees no key.
    """
    q = q * ops.cast(q.shape[-1] ** -0.5, q.dtype)
    masks = {}  # JAX needs them as arguments, and it takes only floats as arguments
    if seen is not None:
        masks["seen"] = ops.cast(seen if len(seen.shape) == 2 else ops.expand_dims(seen, 1), "float32")
    if dropout is not None:
        (b, i, h, _), j = ops.shape(q), ops.shape(k)[1]
        masks["kept"] = dropout(ops.ones((b, h, i, j), v.dtype))
    run = lambda q, k, v, *values: _with_gradient(q, k, v, **dict(zip(masks, values, strict=True)))  # noqa: E731
    return ops.custom_gradient(run)(q, k, v, *masks.values())


def _with_gradient(q, k, v, seen=None, kept=None):
    """The output, and gradients by hand, as in FlashAttention (Dao et al., arXiv:2205.14135, section 3.1).

    Derived gradients would keep the weights in float32, and read them once more to sum each row.
    """
    scores = accumulate.einsum("bihs,bjhs->bhij", q, k)
    weights, total = (_exponentials if accelerator.on_tpu() else _softmax)(scores, seen)
    weights = ops.cast(ops.reshape(weights, ops.shape(scores)), v.dtype)
    wide = lambda x: ops.cast(x, scores.dtype)  # noqa: E731
    divided = lambda x: ops.cast(wide(x) / total, x.dtype)  # noqa: E731
    dropped = (lambda x: x) if kept is None else (lambda x: x * kept)
    out = divided(ops.einsum("bhij,bjhe->bihe", dropped(weights), v))

    def gradient(dout):
        dout = divided(dout)
        own = ops.transpose(ops.sum(wide(dout) * wide(out), axis=-1), (0, 2, 1))[..., None]  # [b, h, i, 1]
        dweights = dropped(ops.einsum("bihe,bjhe->bhij", dout, v))
        dscores = ops.cast(wide(weights) * (wide(dweights) - own), q.dtype)
        dq, dk = ops.einsum("bhij,bjhs->bihs", dscores, k), ops.einsum("bhij,bihs->bjhs", dscores, q)
        dv = ops.einsum("bhij,bihe->bjhe", dropped(weights), dout)
        return dq, dk, dv, *(ops.zeros_like(mask) for mask in (seen, kept) if mask is not None)

    return out, gradient


def _exponentials(scores, mask=None):
    """Weights `[b, h, i, j]` before division, 0 outside the mask, and their sums, `[b, i, h, 1]`.

    A TPU takes maximum, exponential and sum in one pass over the scores, and divides after the product with the values.
    A division of the weights would be another pass over all pairs, and so would a maximum with an `initial` value.
    """
    seen = None if mask is None else mask > 0
    scores = scores if seen is None else ops.where(seen, scores, ops.cast(-1e30, scores.dtype))
    weights = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True))
    weights = weights if seen is None else zero_outside(weights, seen)
    total = ops.expand_dims(ops.transpose(ops.sum(weights, axis=-1), (0, 2, 1)), -1)
    return weights, ops.where(total > 0, total, ops.ones_like(total))


def _softmax(scores, mask=None):
    """Weights after division, with all heads' rows in one axis, `[b h, i, j]`, and the divisor 1.

    On `[b, h, i, j]`, XLA takes the rows of 32 texts at once on a GPU, at a third of the memory's speed. It also keeps
    float32 scores and computes the softmax again in the backward pass.
    """
    b, h, *pairs_shape = ops.shape(scores)
    rows = lambda x: ops.reshape(x, (b * h, *pairs_shape))  # noqa: E731
    if mask is None:
        return ops.softmax(rows(scores), axis=-1), 1
    seen = mask > 0 if len(mask.shape) == 2 else rows(ops.broadcast_to(mask > 0, ops.shape(scores)))
    return zero_outside(ops.softmax(ops.where(seen, rows(scores), ops.cast(-1e30, scores.dtype)), axis=-1), seen), 1


def softmax_attention_reference(q, k, v, *, causal=False, padding_mask=None, segment_ids=None):
    """Exponentials over their sum, with the mask as a factor."""
    n = v.shape[1]
    seen = ops.ones((1, n, n), "bool") if not causal else ops.tril(ops.ones((1, n, n), "bool"))
    if (ids := documents(padding_mask, segment_ids)) is not None:
        seen = seen & (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    scores = ops.einsum("bihs,bjhs->bhij", q, k) / q.shape[-1] ** 0.5
    weights = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True)) * ops.cast(seen[:, None], v.dtype)
    total = ops.sum(weights, axis=-1, keepdims=True)
    return ops.einsum("bhij,bjhe->bihe", weights / ops.where(total > 0, total, ops.ones_like(total)), v)


def initial_state(sizes, case, dtype):
    """An empty cache with room for `n` tokens a row: `k [b, n, h, s]`, `v [b, n, h, e]`, `position [b]`."""
    b, n, h = sizes["b"], sizes["n"], sizes["h"]
    return {
        "k": ops.zeros((b, n, h, sizes["s"]), dtype),
        "v": ops.zeros((b, n, h, sizes["e"]), dtype),
        "position": ops.zeros((b,), "int32"),
    }


def extend(state, q, k, v, *, valid=None, causal=True):
    """The next k tokens of each row against the cache, which must have room for them."""
    start, new = state["position"], ops.shape(q)[1]
    cache = {name: append(state[name], x, start, valid) for name, x in (("k", k), ("v", v))}
    at = start[:, None] + ops.arange(new, dtype="int32")  # [b, k]
    seen = attention_mask(None, None, at, ops.arange(cache["k"].shape[1], dtype="int32")[None], causal)
    out = attend(q, cache["k"], cache["v"], seen)
    return out, {**cache, "position": start + (new if valid is None else valid)}


def cache_bytes(sizes, case, itemsize):
    """Bytes of the cache and of one int32 position for each row."""
    return sizes["b"] * (sizes["n"] * sizes["h"] * (sizes["s"] + sizes["e"]) * itemsize + 4)


def attention_flops(sizes, case):
    """Two products over all pairs, or over half of them if causal."""
    pairs_times_two = (1 if case.get("causal") else 2) * sizes["n"] ** 2
    return sizes["b"] * sizes["h"] * pairs_times_two * (sizes["s"] + sizes["e"])


SPEC = KernelSpec(
    name="softmax_attention",
    fast=softmax_attention,
    reference=softmax_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=attention_flops,
    state_bytes=cache_bytes,
)
