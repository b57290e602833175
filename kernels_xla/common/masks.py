"""Who may see whom. Padding is document 0, so that one comparison answers for padding and for packing."""

from keras import ops

from kernels_xla.common.spec import Tensor

STRIPS, UNIT = 4, 128  # strips of a row at most, and what their lengths are multiples of: tiles of matrix products


def documents(padding_mask: Tensor | None, segment_ids: Tensor | None) -> Tensor | None:
    """The document of each token, int32 `[b, n]`, 0 at padding; None when all tokens are one document.

    Args:
      padding_mask: `[b, n]`, True at real tokens, or None.
      segment_ids: `[b, n]`, 0 at padding, or None.
    """
    if segment_ids is None:
        return None if padding_mask is None else ops.cast(padding_mask, "int32")
    ids = ops.cast(segment_ids, "int32")
    return ids if padding_mask is None else ids * ops.cast(padding_mask, "int32")


def attention_mask(query_ids: Tensor | None, key_ids: Tensor | None, queries: Tensor, keys: Tensor, causal: bool):
    """Whether query i may see key j, bool `[..., i, j]`; None when every one sees every one.

    Args:
      query_ids: Documents of the queries, `[..., i]`, or None.
      key_ids: Documents of the keys, `[..., j]`; given exactly when `query_ids` is.
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
    """`x` where the mask holds and 0 elsewhere; whatever stands elsewhere, infinite or not, leaves no trace."""
    return x if where is None else ops.where(where, x, ops.zeros((), dtype=x.dtype))


def strips(ids: Tensor | None, at: Tensor, causal: bool, least: int) -> list[tuple[slice, slice, Tensor | None]]:
    """Cuts the queries of causal attention into strips, each of which reads the keys before its own end alone.

    So k strips leave 1/2 + 1/2k of all pairs. There are `STRIPS` at most: each has its own gradient of all keys and
    values that it reads, a pass over them which the pairs that it saves must pay for.

    Args:
      ids: Documents, `[b, n]`, or None.
      at: Positions, `[n]`. Where n is known only at run time, or the attention not causal, one strip is all.
      causal: Whether a query sees only keys at or before its position.
      least: Tokens of a strip at least, but for the last.

    Returns:
      Of each strip its queries, its keys, and `attention_mask` of them.
    """
    n, cuts = at.shape[0], [(slice(None), slice(None))]
    if causal and n is not None and n >= 2 * least:
        length = max(least, -(-n // (STRIPS * UNIT)) * UNIT)
        cuts = [(slice(start, start + length), slice(start + length)) for start in range(0, n, length)]
    of = lambda tokens: None if ids is None else ids[:, tokens]  # noqa: E731
    return [(i, j, attention_mask(of(i), of(j), at[i], at[j], causal)) for i, j in cuts]
