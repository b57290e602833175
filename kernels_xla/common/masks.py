"""Which token may see which. Padding is document 0, so that one comparison covers padding and packing."""

from keras import ops

from kernels_xla.common.spec import Tensor

STRIPS, UNIT = 4, 128  # most strips of a row; their lengths are multiples of UNIT, a tile of a matrix product


def documents(padding_mask: Tensor | None, segment_ids: Tensor | None) -> Tensor | None:
    """The document of each token, int32 `[b, n]`, 0 at padding; None if all tokens are one document.

    Args:
      padding_mask: `[b, n]`, True at real tokens, or None.
      segment_ids: `[b, n]`, 0 at padding, or None.
    """
    if segment_ids is None:
        return None if padding_mask is None else ops.cast(padding_mask, "int32")
    ids = ops.cast(segment_ids, "int32")
    return ids if padding_mask is None else ids * ops.cast(padding_mask, "int32")


def attention_mask(query_ids: Tensor | None, key_ids: Tensor | None, queries: Tensor, keys: Tensor, causal: bool):
    """Whether query i may see key j, bool `[..., i, j]`; None if every query sees every key.

    Args:
      query_ids: Documents of the queries, `[..., i]`, or None.
      key_ids: Documents of the keys, `[..., j]`; None if and only if `query_ids` is None.
      queries: Positions of the queries, `[..., i]`.
      keys: Positions of the keys, `[..., j]`.
      causal: Whether a query sees only keys at or before its position.
    """
    seen = None
    if causal:
        seen = ops.expand_dims(keys, -2) <= ops.expand_dims(queries, -1)
    if query_ids is not None:
        same = ops.expand_dims(query_ids, -1) == ops.expand_dims(key_ids, -2)
        same = ops.logical_and(same, ops.expand_dims(key_ids, -2) > 0)
        seen = same if seen is None else ops.logical_and(seen, same)
    return seen


def zero_outside(x: Tensor, where: Tensor | None) -> Tensor:
    """`x` where the mask holds and 0 elsewhere. Values elsewhere leave no trace, not even infinities."""
    return x if where is None else ops.where(where, x, ops.zeros((), dtype=x.dtype))


def strips(ids: Tensor | None, at: Tensor, causal: bool, least: int) -> list[tuple[slice, slice, Tensor | None]]:
    """Cuts the queries of causal attention into strips. Each strip reads only the keys before its own end.

    With k strips, 1/2 + 1/2k of all pairs remain. We use `STRIPS` at most, because each strip adds a gradient pass
    over the keys and values that it reads.

    Args:
      ids: Documents, `[b, n]`, or None.
      at: Positions, `[n]`. There is one strip if n is known only at run time or attention is not causal.
      causal: Whether a query sees only keys at or before its position.
      least: Least number of tokens in a strip, except the last.

    Returns:
      For each strip its queries, its keys, and their `attention_mask`.
    """
    n, cuts = at.shape[0], [(slice(None), slice(None))]
    if causal and n is not None and n >= 2 * least:
        length = max(least, -(-n // (STRIPS * UNIT)) * UNIT)
        cuts = [(slice(start, start + length), slice(start + length)) for start in range(0, n, length)]
    of = lambda tokens: None if ids is None else ids[:, tokens]  # noqa: E731
    return [(i, j, attention_mask(of(i), of(j), at[i], at[j], causal)) for i, j in cuts]
