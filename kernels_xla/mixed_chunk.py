"""Mixed chunk attention of FLASH: quadratic inside a chunk, linear across chunks.

Source: Hua et al., "Transformer Quality in Linear Time", arXiv:2202.10447, section 3.2 and Code 1. The paper
leaves divisors, padding and packing open; those below depend on no length in a causal row, so that streaming is exact.
"""

from typing import Literal

from keras import ops

from kernels_xla.accumulate import sum_dtype
from kernels_xla.chunking import edges, fold, sum_of_earlier, sum_of_later, unfold
from kernels_xla.masks import documents, keep, pairs
from kernels_xla.mixed_chunk_stream import extend, initial_state, state_bytes
from kernels_xla.rotary import relative_bias
from kernels_xla.spec import KernelSpec, Stream, Tensor

Scale = Literal["normalized", "paper_appendix"]


def mixed_chunk_attention(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    chunk_size: int,
    causal: bool = False,
    scale: Scale = "normalized",
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
) -> Tensor:
    """Adds squared-ReLU attention within each chunk to linear attention over chunks.

    With chunk(i) = i // c on the fixed grid of the row, position i receives

        sum over j of chunk(i):          w[i, j] v[j]
      + sum over j of the chunks seen:   (q_lin[i] . k_lin[j] / N) v[j]

        normalized:      w = relu(q_quad[i] . k_quad[j] / sqrt(s) + bias[i - j])^2 / c
        paper_appendix:  w = relu(q_quad[i] . k_quad[j] / c + bias[i - j])^2

    If `causal`, the first sum stops at j = i and the second takes the chunks before chunk(i); otherwise the second
    takes every chunk, its own included. N counts the real tokens in the second sum: g c for chunk g of an unpadded row,
    so no length enters a causal row. Both sums stay inside the document of i.

    Args:
      q_quad: Queries of the first sum, `[b, n, s]`.
      k_quad: Keys of the first sum, `[b, n, s]`.
      q_lin: Queries of the second sum, `[b, n, s]`.
      k_lin: Keys of the second sum, `[b, n, s]`.
      v: Values, `[b, n, e]`.
      a: Left half of the relative bias, `[r]`; None for no bias.
      b: Right half, `[r]`.
      chunk_size: c, in tokens. Part of the model: changing it changes the function, not just its speed.
      causal: Whether position i may depend only on positions <= i.
      scale: Where the divisor c stands; see above.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding, each document one run. A document that starts on a multiple of c gets, if
        causal, exactly what it gets alone; one that does not has chunks cut by the grid.
      offset: Added to the positions of the bias, which does not change it; a zero that is known only at run time keeps
        the compiler from storing the bias' tables in the program.

    Returns:
      `[b, n, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n (c + s) e + n c s) multiply-adds and O(n (c + e) + (n / c) s e) memory: linear in n.

    Precision:
      The bias is float32; products are in the dtype of the inputs and accumulate in float32, the sum over chunks too,
      so that a sum is rounded once for a chunk, once for all chunks, whatever their number.
    """
    n, ids = ops.shape(v)[1], documents(padding_mask, segment_ids)
    real = None if ids is None else ids > 0
    v = v if real is None else keep(v, real[..., None])
    q_quad, k_quad, q_lin, k_lin, v = (fold(x, chunk_size) for x in (q_quad, k_quad, q_lin, k_lin, v))
    ids = None if ids is None else fold(ids, chunk_size)  # [b, g, c]
    packed = None if segment_ids is None else ids
    at = ops.arange(chunk_size, dtype="int32")

    local = _local(q_quad, k_quad, v, a, b, pairs(packed, packed, at, at, causal), scale, offset)
    if causal:
        out = local + _from_earlier_chunks(q_lin, k_lin, v, ids, packed)
    elif packed is None:
        tokens = n if real is None else ops.sum(ops.cast(real, "int32"), axis=-1, keepdims=True)
        out = local + _from_all_chunks(q_lin, k_lin, v, tokens)
    else:
        out = local + _from_own_document(q_lin, k_lin, v, packed)
    out = unfold(out, n)
    return out if real is None else keep(out, real[..., None])


def _local(q, k, v, a, b, seen, scale, offset=0):
    """The first sum: q, k `[b, g, c, s]`, v `[b, g, c, e]`, seen `[c, c]` or `[b, g, c, c]` -> `[b, g, c, e]`."""
    c, s = q.shape[2:]
    content, added = _factors(s, c, scale)
    scores = ops.einsum("bgis,bgjs->bgij", q * ops.cast(content, q.dtype), k)
    if a is not None:
        at = ops.arange(c, dtype="int32") + offset
        scores = scores + ops.cast(added * relative_bias(a, b, at, at), scores.dtype)
    return ops.einsum("bgij,bgje->bgie", keep(ops.square(ops.relu(scores)), seen), v)


def _factors(s, c, scale):
    """Both scales are relu(content q . k + added bias)^2; on q the factor touches s numbers a token instead of c."""
    return ((s * c) ** -0.5, c**-0.5) if scale == "normalized" else (1.0 / c, 1.0)


def _summaries(k, v):
    """Each chunk as one matrix: `[b, g, c, s]`, `[b, g, c, e]` -> `[b, g, s, e]`."""
    return ops.einsum("bgjs,bgje->bgse", k, v)


def _read(q, sums, tokens):
    """Reads chunk sums `[b, g, s, e]`, each over `tokens` `[b, g]` or `[1, g]`, with q `[b, g, c, s]`."""
    return ops.einsum("bgis,bgse->bgie", _shared(q, tokens[..., None, None]), sums)


def _shared(q, tokens):
    """Divides q by the number of tokens that it reads: q is narrower than the sums are."""
    count = ops.maximum(ops.cast(tokens, sum_dtype(q)), 1)
    return ops.cast(ops.cast(q, count.dtype) / count, q.dtype)


def _from_earlier_chunks(q, k, v, ids, packed):
    """The causal second sum.

    A document runs from the end of one chunk into the start of the next, so that the last document of a chunk is all
    that later ones can read of it, and its first document all that reads earlier ones.
    """
    if packed is None:
        full = ops.full((1, ops.shape(v)[1]), v.shape[2], dtype="int32")
        tokens = full if ids is None else ops.sum(ops.cast(ids > 0, "int32"), axis=-1)
        return _read(q, sum_of_earlier(_summaries(k, v)), _count_earlier(tokens))
    first, last = edges(ids)
    reads, is_read = ids == first[..., None], ids == last[..., None]  # [b, g, c]
    sums = sum_of_earlier(_summaries(keep(k, is_read[..., None]), v), first, last)
    tokens = _count_earlier(ops.sum(ops.cast(is_read, "int32"), axis=-1), first, last)
    return _read(keep(q, reads[..., None]), sums, tokens)


def _count_earlier(tokens, first=None, last=None):
    """`sum_of_earlier` of token counts `[b, g]`; float32 products are exact up to 2^24 tokens."""
    return sum_of_earlier(ops.cast(tokens, "float32"), first, last)


def _from_all_chunks(q, k, v, tokens):
    """The second sum without order: every token reads every real one. `tokens` is their number, scalar or `[b, 1]`."""
    tokens = tokens if isinstance(tokens, int) else ops.reshape(tokens, (-1, 1, 1, 1))
    return ops.einsum("bgis,bse->bgie", _shared(q, tokens), ops.einsum("bgjs,bgje->bse", k, v))


def _from_own_document(q, k, v, ids):
    """The second sum without order, packed: own chunk by pairs, then the document's part in chunks before and after."""
    first, last = edges(ids)
    at_first, at_last = ids == first[..., None], ids == last[..., None]  # [b, g, c]
    same = pairs(ids, ids, None, None, causal=False)  # [b, g, c, c]
    before = sum_of_earlier(_summaries(keep(k, at_last[..., None]), v), first, last)
    after = sum_of_later(_summaries(keep(k, at_first[..., None]), v), first, last)

    count = lambda x: ops.sum(ops.cast(x, "float32"), axis=-1)  # noqa: E731
    tokens = count(same)  # [b, g, c]
    tokens = tokens + ops.where(at_first, sum_of_earlier(count(at_last), first, last)[..., None], 0.0)
    tokens = tokens + ops.where(at_last, sum_of_later(count(at_first), first, last)[..., None], 0.0)

    q = _shared(q, tokens[..., None])
    own = ops.einsum("bgij,bgje->bgie", keep(ops.einsum("bgis,bgjs->bgij", q, k), same), v)
    reader = zip((at_first, at_last), (before, after), strict=True)
    return own + sum(
        ops.einsum("bgis,bgse->bgie", keep(q, reads[..., None]), ops.cast(sums, q.dtype)) for reads, sums in reader
    )


def mixed_chunk_attention_reference(
    q_quad,
    k_quad,
    q_lin,
    k_lin,
    v,
    a=None,
    b=None,
    *,
    chunk_size,
    causal=False,
    scale="normalized",
    padding_mask=None,
    segment_ids=None,
):
    """The docstring's two sums as one dense `[n, n]` weight matrix."""
    n, s, dtype = v.shape[1], q_quad.shape[-1], v.dtype
    at = ops.arange(n)
    ids = documents(padding_mask, segment_ids)
    ids = ops.ones((1, n), "int32") if ids is None else ids
    document = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)  # [b, i, j]
    chunk = at // chunk_size
    inside = document & (chunk[:, None] == chunk[None, :])
    across = document & (chunk[None, :] < chunk[:, None]) if causal else document
    inside = inside & (at[None, :] <= at[:, None]) if causal else inside

    bias = 0 if a is None else ops.cast(relative_bias(a, b, at, at), dtype)
    scores = ops.einsum("bis,bjs->bij", q_quad, k_quad)
    if scale == "normalized":
        quadratic = ops.square(ops.relu(scores / s**0.5 + bias)) / chunk_size
    else:
        quadratic = ops.square(ops.relu(scores / chunk_size + bias))
    tokens = ops.sum(ops.cast(across, dtype), axis=-1, keepdims=True)
    linear = ops.einsum("bis,bjs->bij", q_lin, k_lin) / ops.maximum(tokens, ops.ones_like(tokens))
    weights = quadratic * ops.cast(inside, dtype) + linear * ops.cast(across, dtype)
    return ops.einsum("bij,bje->bie", weights, v)


def _flops(sizes, case):
    b, n, s, e, c = (*(sizes[axis] for axis in "bnse"), case["chunk_size"])
    inside = n // c * c * c + (n % c) ** 2  # pairs
    return b * ((1 if case["causal"] else 2) * inside * (s + e) + 4 * n * s * e)


SPEC = KernelSpec(
    name="mixed_chunk",
    fast=mixed_chunk_attention,
    reference=mixed_chunk_attention_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: case["causal"]),
    inputs={"q_quad": "bns", "k_quad": "bns", "q_lin": "bns", "k_lin": "bns", "v": "bne", "a": "r", "b": "r"},
    cases=tuple(
        {"chunk_size": c, "causal": causal, "scale": scale}
        for c in (4, 16)
        for causal in (False, True)
        for scale in ("normalized", "paper_appendix")
    ),
    timed={"chunk_size": 256, "causal": True},
    flops=_flops,
    state_bytes=state_bytes,
    model_chunk=lambda case: case["chunk_size"],
)
