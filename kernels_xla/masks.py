"""Who may see whom. Padding is document 0, so that one comparison answers for padding and for packing."""

from keras import ops

from kernels_xla.spec import Tensor


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


def pairs(query_ids: Tensor | None, key_ids: Tensor | None, queries: Tensor, keys: Tensor, causal: bool):
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


def keep(x: Tensor, where: Tensor | None) -> Tensor:
    """`x` where the mask holds and 0 elsewhere; whatever stands elsewhere, infinite or not, leaves no trace."""
    return x if where is None else ops.where(where, x, ops.zeros((), dtype=x.dtype))
