"""The second sum of mixed chunk attention, in its parallel form: linear attention across chunks."""

from keras import ops

from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.chunking import edges, sum_of_earlier, sum_of_later
from kernels_xla.common.masks import attention_mask, zero_outside
from kernels_xla.common.spec import Tensor


def inter_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n,
    ids: Tensor | None,
    packed: Tensor | None,
    causal: bool,
    divisor: int | None = None,
    inside: Tensor | None = None,
) -> Tensor:
    """The sum over the visible chunks, divided by the number of tokens in it.

    Args:
      q: `[b, g, c, s]`.
      k: `[b, g, c, s]`.
      v: `[b, g, c, e]`, 0 at padding.
      n: Tokens of a row.
      ids: Documents, `[b, g, c]`, 0 at padding; None if a row is one document without padding.
      packed: `ids` if a row may hold several documents, else None.
      causal: Whether only the chunks before are visible, instead of all.
      divisor: A constant in place of the number of tokens.
      inside: Weights of the pairs in a chunk, `[b, g, c, c]`, whose sum over v is added; None for none.

    Returns:
      `[b, g, c, e]`.
    """
    if packed is not None and not causal:
        return _from_own_document(q, k, v, packed, divisor, inside)
    if causal:
        out = _from_earlier_chunks(q, k, v, ids, packed, divisor)
    else:
        tokens = n if ids is None else ops.sum(ops.cast(ids > 0, "int32"), axis=(1, 2))
        out = _from_all_chunks(q, k, v, tokens if divisor is None else divisor)
    return out if inside is None else ops.einsum("bgij,bgje->bgie", inside, v) + out


def _summaries(k, v):
    """One matrix for each chunk: `[b, g, c, s]`, `[b, g, c, e]` -> `[b, g, s, e]`."""
    return ops.einsum("bgjs,bgje->bgse", k, v)


def _read(q, sums, tokens, divisor=None):
    """Reads chunk sums `[b, g, s, e]`, each over `tokens` `[b, g]` or `[1, g]`, with q `[b, g, c, s]`."""
    tokens = tokens[..., None, None] if divisor is None else divisor
    return ops.einsum("bgis,bgse->bgie", divided(q, tokens), sums)


def divided(q: Tensor, tokens: Tensor | int) -> Tensor:
    """Divides q by the number of tokens that it reads. Queries are narrower than the sums."""
    count = ops.maximum(ops.cast(tokens, sum_dtype(q)), 1)
    return ops.cast(ops.cast(q, count.dtype) / count, q.dtype)


def _from_earlier_chunks(q, k, v, ids, packed, divisor):
    """The causal second sum.

    A document continues from the end of one chunk into the start of the next. Later chunks can therefore read only the
    last document of a chunk, and only its first document reads earlier chunks.
    """
    if packed is None:
        full = ops.full((1, ops.shape(v)[1]), v.shape[2], dtype="int32")
        tokens = full if ids is None else ops.sum(ops.cast(ids > 0, "int32"), axis=-1)
        return _read(q, sum_of_earlier(_summaries(k, v)), count_earlier(tokens), divisor)
    first, last = edges(ids)
    reads, is_read = ids == first[..., None], ids == last[..., None]  # [b, g, c]
    sums = sum_of_earlier(_summaries(zero_outside(k, is_read[..., None]), v), first, last)
    tokens = count_earlier(ops.sum(ops.cast(is_read, "int32"), axis=-1), first, last)
    return _read(zero_outside(q, reads[..., None]), sums, tokens, divisor)


def count_earlier(tokens: Tensor, first: Tensor | None = None, last: Tensor | None = None) -> Tensor:
    """`sum_of_earlier` of token counts `[b, g]`; float32 products are exact up to 2^24 tokens."""
    return sum_of_earlier(ops.cast(tokens, "float32"), first, last)


def _from_all_chunks(q, k, v, tokens):
    """The second sum without order: every token reads every real token. `tokens` is their number, scalar or `[b]`."""
    tokens = tokens if isinstance(tokens, int) else ops.reshape(tokens, (-1, 1, 1, 1))
    return ops.einsum("bgis,bse->bgie", divided(q, tokens), ops.einsum("bgjs,bgje->bse", k, v))


def _from_own_document(q, k, v, ids, divisor, inside):
    """The second sum without order, packed: pairs in the own chunk, then the document's part in other chunks.

    The weights of its pairs in the own chunk are added to `inside`, so that one product takes both.
    """
    first, last = edges(ids)
    at_first, at_last = ids == first[..., None], ids == last[..., None]  # [b, g, c]
    same = attention_mask(ids, ids, None, None, causal=False)  # [b, g, c, c]
    before = sum_of_earlier(_summaries(zero_outside(k, at_last[..., None]), v), first, last)
    after = sum_of_later(_summaries(zero_outside(k, at_first[..., None]), v), first, last)

    count = lambda x: ops.sum(ops.cast(x, "float32"), axis=-1)  # noqa: E731
    tokens = count(same)  # [b, g, c]
    tokens = tokens + ops.where(at_first, sum_of_earlier(count(at_last), first, last)[..., None], 0.0)
    tokens = tokens + ops.where(at_last, sum_of_later(count(at_first), first, last)[..., None], 0.0)

    q = divided(q, tokens[..., None] if divisor is None else divisor)
    own = zero_outside(ops.einsum("bgis,bgjs->bgij", q, k), same)
    own = own if inside is None else inside + own
    reader = zip((at_first, at_last), (before, after), strict=True)
    return ops.einsum("bgij,bgje->bgie", own, v) + sum(
        ops.einsum("bgis,bgse->bgie", zero_outside(q, reads[..., None]), ops.cast(sums, q.dtype))
        for reads, sums in reader
    )
