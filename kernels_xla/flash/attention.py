"""FLASH's mixed chunk attention: quadratic inside a chunk, linear across chunks.

Source: Hua et al., "Transformer Quality in Linear Time", arXiv:2202.10447, section 3.2 and Code 1. The paper
leaves divisors, padding and packing open. Ours depend on no length in a causal row, so that streaming is exact.
"""

from typing import Literal

from keras import ops

from kernels_xla.common.chunking import fold, unfold
from kernels_xla.common.masks import attention_mask, documents, zero_outside
from kernels_xla.common.rotary import relative_bias
from kernels_xla.common.spec import KernelSpec, Stream, Tensor
from kernels_xla.flash.decode import extend, initial_state, state_bytes
from kernels_xla.flash.first_to_all import Rows, check_first, first_tokens, softmax_of_first
from kernels_xla.flash.inter_chunk import inter_chunk_attention
from kernels_xla.flash.intra_chunk import intra_chunk_weights, with_previous

Scale = Literal["normalized", "paper_appendix"]


def mixed_chunk_attention(
    quad_q: Tensor | None,
    quad_k: Tensor | None,
    lin_q: Tensor | None,
    lin_k: Tensor | None,
    v: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    chunk_size: int,
    causal: bool = False,
    scale: Scale = "normalized",
    overlapping: bool = False,
    first_to_all: Rows = "none",
    chunk_divisor: bool = False,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
) -> Tensor:
    """Adds squared-ReLU attention within each chunk to linear attention over chunks.

    With chunk(i) = i // c on the fixed grid of the row, position i receives

        sum over j of the window:          w[i, j] v[j]
      + sum over j of the visible chunks:  (lin_q[i] . lin_k[j] / N) v[j]

        normalized:      w = relu(quad_q[i] . quad_k[j] / sqrt(s) + bias[i - j])^2 / m
        paper_appendix:  w = relu(quad_q[i] . quad_k[j] / m + bias[i - j])^2

    The window is chunk(i), and m = c. If `overlapping`, the window also has the chunk before, causal or not. Then m =
    2c at every token, and the bias has distances up to 2c - 1. Section 3.2.1 gives no formula, so this is our
    definition. If `causal`, the first sum stops at j = i and the second takes the chunks before chunk(i). Otherwise the
    second takes every chunk, its own included. N counts the real tokens in the second sum. It is g c for chunk g of an
    unpadded row, so a causal row depends on no length. Both sums stay inside the document of i.

    Without quad_q and quad_k there is no first sum, and without lin_q and lin_k no second. These are FLASH (GlobalOnly)
    and FLASH (LocalOnly) of section 4.4. A causal token with the second sum alone receives nothing from its own chunk,
    not even from itself. Tokens of the first chunk then receive zeros.

    Args:
      quad_q: Queries of the first sum, `[b, n, s]`; or None.
      quad_k: Keys of the first sum, `[b, n, s]`; None with `quad_q`.
      lin_q: Queries of the second sum, `[b, n, s]`; or None.
      lin_k: Keys of the second sum, `[b, n, s]`; None with `lin_q`.
      v: Values, `[b, n, e]`.
      a: Left half of the relative bias of the first sum, `[r]`; None for no bias.
      b: Right half, `[r]`. None if `a` has the bias of each distance in the window, `[2m]`; see `relative_bias`.
      chunk_size: c, in tokens. Part of the model: changing it changes the function, not just its speed.
      causal: Whether position i may depend only on positions <= i.
      scale: The place of the divisor m; see above.
      overlapping: Whether the first sum also takes the chunk before.
      first_to_all: "chunks": the first token of each chunk receives softmax_j(quad_q[i] . quad_k[j] / sqrt(s)) v[j]
        over all real tokens j of its document, instead of both sums. "cls": only the first token of the text receives
        it; in packed rows, the first token of each document that starts on a multiple of c. The slot counts: if it is
        padding, no other token takes its place. It needs `causal` to be False. The paper's section 4.3 describes it in
        words. We define that it uses the heads of the first sum without bias, and adds nothing.
      chunk_divisor: Whether N is c, as in lucidrains' FLASH-pytorch. The second sum then grows with the text.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding; each document is one run. A causal document that starts on a multiple of c
        gets exactly the same result as alone. The grid cuts the chunks of any other document.
      offset: Added to the positions of the bias, which does not change it. A zero that is known only at run time keeps
        the compiler from storing the bias tables in the program.

    Returns:
      `[b, n, e]`, in the dtype of `v`; 0 at padding.

    Raises:
      ValueError: Both sums lack queries. Or a bias, `overlapping` or `first_to_all` comes without the first sum. Or
        `scale` or `first_to_all` is unknown, or `first_to_all` is not "none" although `causal`.

    Cost:
      O(n (m + s) e + n m s) multiply-adds and O(n (m + e) + (n / c) s e) memory: linear in n. `first_to_all="chunks"`
      adds O(n^2 / c (s + e)). "cls" adds as much in packed rows, else O(n (s + e)).

    Precision:
      The bias is computed in float32 and added in the dtype of the scores. Products are in the dtype of the inputs and
      accumulate in float32, also over chunks. A sum is rounded once for a chunk and once for all chunks, whatever their
      number.
    """
    _check(quad_q, lin_q, a is not None or overlapping or first_to_all != "none", scale)
    check_first("flash", first_to_all, causal)
    n, ids = ops.shape(v)[1], documents(padding_mask, segment_ids)
    v = v if ids is None else zero_outside(v, (ids > 0)[..., None])
    q1, k1, q2, k2, values, grid = (
        None if x is None else fold(x, chunk_size) for x in (quad_q, quad_k, lin_q, lin_k, v, ids)
    )
    packed = None if segment_ids is None else grid  # [b, g, c]

    weights = None if quad_q is None else _weights(q1, k1, a, b, packed, causal, scale, overlapping, offset)
    apart = weights is not None and (overlapping or lin_q is None)  # else one call takes both sums
    if apart:
        out = ops.einsum("bgij,bgje->bgie", weights, with_previous(values) if overlapping else values)
    if lin_q is not None:
        divisor, inside = chunk_size if chunk_divisor else None, None if apart else weights
        across = inter_chunk_attention(q2, k2, values, n, grid, packed, causal, divisor, inside)
        out = out + across if apart else across
    out = unfold(out, n)
    if first_to_all != "none":
        taken = first_tokens(ops.arange(n, dtype="int32"), chunk_size, first_to_all, segment_ids)
        rows = softmax_of_first(quad_q, quad_k, v, chunk_size, first_to_all, ids, packed is not None)
        out = ops.where(taken[..., None], rows, out)
    return out if ids is None else zero_outside(out, (ids > 0)[..., None])


def _check(quad_q, lin_q, of_first, scale):
    if scale not in ("normalized", "paper_appendix"):
        raise ValueError(f"flash: scale must be 'normalized' or 'paper_appendix', got {scale!r}")
    if quad_q is None and lin_q is None:
        raise ValueError("flash needs the queries and keys of one sum at least, got none")
    if quad_q is None and of_first:
        raise ValueError("flash: bias, overlapping and first_to_all are of the first sum: they need quad_q, got None")


def _weights(q, k, a, b, packed, causal, scale, overlapping, offset):
    """The weights of the first sum: q, k `[b, g, c, s]` -> `[b, g, c, m]`."""
    c, key_ids = q.shape[2], packed
    if overlapping:
        k, key_ids = (None if x is None else with_previous(x) for x in (k, packed))
    at = ops.arange(k.shape[2], dtype="int32")
    return intra_chunk_weights(q, k, a, b, attention_mask(packed, key_ids, at[-c:], at, causal), scale, offset)


def mixed_chunk_attention_reference(
    quad_q,
    quad_k,
    lin_q,
    lin_k,
    v,
    a=None,
    b=None,
    *,
    chunk_size,
    causal=False,
    scale="normalized",
    overlapping=False,
    first_to_all="none",
    chunk_divisor=False,
    padding_mask=None,
    segment_ids=None,
):
    """The docstring's two sums as one dense `[n, n]` weight matrix."""
    n, dtype = v.shape[1], v.dtype
    at = ops.arange(n, dtype="int32")
    ids = documents(padding_mask, segment_ids)
    ids = ops.ones((1, n), "int32") if ids is None else ids
    document = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)  # [b, i, j]
    behind = at[:, None] // chunk_size - at[None, :] // chunk_size
    weights = ops.zeros((1, 1, 1), dtype)
    if quad_q is not None:
        inside = document & (behind >= 0) & (behind <= int(overlapping))
        inside = inside & (at[None, :] <= at[:, None]) if causal else inside
        bias = 0 if a is None else ops.cast(relative_bias(a, b, at, at), dtype)
        window = (1 + overlapping) * chunk_size
        weights = weights + ops.cast(inside, dtype) * _quadratic(quad_q, quad_k, bias, window, scale)
    if lin_q is not None:
        across = document & (behind > 0) if causal else document
        tokens = ops.sum(ops.cast(across, dtype), axis=-1, keepdims=True)
        tokens = ops.full_like(tokens, chunk_size) if chunk_divisor else ops.maximum(tokens, ops.ones_like(tokens))
        linear = ops.einsum("bis,bjs->bij", lin_q, lin_k) / tokens
        weights = weights + ops.cast(across, dtype) * linear
    if first_to_all != "none":
        taken = first_tokens(at, chunk_size, first_to_all, segment_ids)
        weights = ops.where(taken[..., None], _softmax(quad_q, quad_k, document), weights)
    return ops.einsum("bij,bje->bie", weights, v)


def _quadratic(q, k, bias, window, scale):
    scores = ops.einsum("bis,bjs->bij", q, k)
    if scale == "normalized":
        return ops.square(ops.relu(scores / q.shape[-1] ** 0.5 + bias)) / window
    return ops.square(ops.relu(scores / window + bias))


def _softmax(q, k, seen):
    scores = ops.einsum("bis,bjs->bij", q, k) / q.shape[-1] ** 0.5
    weights = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True)) * ops.cast(seen, scores.dtype)
    total = ops.sum(weights, axis=-1, keepdims=True)
    return weights / ops.where(total > 0, total, ops.ones_like(total))


def _flops(sizes, case):
    b, n, s, e, c = (*(sizes[axis] for axis in "bnse"), case["chunk_size"])
    inside = n // c * c * c + (n % c) ** 2  # pairs
    before = (n - min(n, c)) * c if case.get("overlapping") else 0
    intra = 0 if "quad_q" in case else ((1 if case["causal"] else 2) * inside + 2 * before) * (s + e)
    across = 0 if "lin_q" in case else 4 * n * s * e
    rows = {"none": 0, "cls": 1, "chunks": -(-n // c)}[case.get("first_to_all", "none")]
    return b * (intra + across + 2 * rows * n * (s + e))


SPEC = KernelSpec(
    name="flash",
    fast=mixed_chunk_attention,
    reference=mixed_chunk_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"quad_q": "bns", "quad_k": "bns", "lin_q": "bns", "lin_k": "bns", "v": "bne", "a": "r", "b": "r"},
    flops=_flops,
    state_bytes=state_bytes,
    model_chunk=lambda case: case["chunk_size"],
)
