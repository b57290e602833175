"""Softmax over a whole text for a few of its tokens, instead of mixed chunk attention."""

from typing import Literal

from keras import ops

from kernels_xla.common.masks import attention_mask
from kernels_xla.common.spec import Tensor
from kernels_xla.softmax_attention import attend

Rows = Literal["none", "cls", "chunks"]


def check_first(name: str, which: str, causal: bool) -> None:
    """Raises a ValueError with the caller's `name` if `which` is unknown, or is not "none" although `causal`."""
    if which not in ("none", "cls", "chunks"):
        raise ValueError(f"{name}: first_to_all must be 'none', 'cls' or 'chunks', got {which!r}")
    if causal and which != "none":
        raise ValueError(f"{name}: first_to_all reads later tokens, so it must be 'none' if causal, got {which!r}")


def first_tokens(at: Tensor, chunk_size: int, which: Rows, segment_ids: Tensor | None) -> Tensor:
    """Whether `which` selects the tokens at positions `at [n]`: bool `[n]`, or `[b, n]` with documents."""
    of_chunk = at % chunk_size == 0
    if which != "cls" or segment_ids is None:
        return of_chunk if which == "chunks" else at == 0
    before = ops.pad(segment_ids, [[0, 0], [1, 0]])[:, :-1]  # 0, as at padding
    return ops.logical_and(of_chunk, segment_ids != before)


def softmax_of_first(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, which: Rows, ids: Tensor | None, packed: bool
) -> Tensor:
    """Softmax attention of the first token of each chunk, or of the text's first token if `which` selects no other.

    Args:
      q: `[b, n, s]`.
      k: `[b, n, s]`.
      v: `[b, n, e]`.
      chunk_size: c.
      which: See `mixed_chunk_attention`; not "none".
      ids: Documents, `[b, n]`, 0 at padding; None if a row is one document without padding.
      packed: Whether a row may hold several documents.

    Returns:
      `[b, n, e]`: each token has the result of its chunk's first token. Or `[b, 1, e]`: the text's first token.
    """
    alone = which == "cls" and not packed
    firsts = slice(0, 1) if alone else slice(None, None, chunk_size)
    seen = None if ids is None else attention_mask(ids[:, firsts], ids, None, None, causal=False)  # [b, g, n]
    rows = attend(q[:, firsts, None], k[:, :, None], v[:, :, None], seen)[:, :, 0]  # [b, g, e]
    return rows if alone else ops.repeat(rows, chunk_size, axis=1)[:, : ops.shape(v)[1]]
