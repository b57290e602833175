"""Softmax over a whole text for few of its tokens, in place of what mixed chunk attention gives them."""

from typing import Literal

from keras import ops

from kernels_xla.common.masks import attention_mask
from kernels_xla.common.spec import Tensor
from kernels_xla.softmax_attention import attend

Rows = Literal["none", "cls", "chunks"]


def check_first(name: str, which: str, causal: bool) -> None:
    """Raises a ValueError in the name of what takes `first_to_all`, unless it is known, and "none" if `causal`."""
    if which not in ("none", "cls", "chunks"):
        raise ValueError(f"{name}: first_to_all must be 'none', 'cls' or 'chunks', got {which!r}")
    if causal and which != "none":
        raise ValueError(f"{name}: first_to_all reads later tokens, so that it must be 'none' if causal, got {which!r}")


def first_tokens(at: Tensor, chunk_size: int, which: Rows, segment_ids: Tensor | None) -> Tensor:
    """Whether each of the tokens at `at` `[n]` is one that `which` means: bool `[n]`, or `[b, n]` by documents."""
    of_chunk = at % chunk_size == 0
    if which != "cls" or segment_ids is None:
        return of_chunk if which == "chunks" else at == 0
    before = ops.pad(segment_ids, [[0, 0], [1, 0]])[:, :-1]  # 0, as at padding
    return ops.logical_and(of_chunk, segment_ids != before)


def softmax_of_first(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, which: Rows, ids: Tensor | None, packed: bool
) -> Tensor:
    """Softmax attention of the first token of each chunk; of the first of the text alone where only that is meant.

    Args:
      q: `[b, n, s]`.
      k: `[b, n, s]`.
      v: `[b, n, e]`.
      chunk_size: c.
      which: See `mixed_chunk_attention`; not "none".
      ids: Documents, `[b, n]`, 0 at padding; None where all are one and real.
      packed: Whether a row may have several.

    Returns:
      What the first of its chunk receives for each token, `[b, n, e]`; or the first of the text for all, `[b, 1, e]`.
    """
    alone = which == "cls" and not packed
    firsts = slice(0, 1) if alone else slice(None, None, chunk_size)
    seen = None if ids is None else attention_mask(ids[:, firsts], ids, None, None, causal=False)  # [b, g, n]
    rows = attend(q[:, firsts, None], k[:, :, None], v[:, :, None], seen)[:, :, 0]  # [b, g, e]
    return rows if alone else ops.repeat(rows, chunk_size, axis=1)[:, : ops.shape(v)[1]]
