"""Padding of attention layers: where the mask comes from, and how padding is kept out of everything."""

import numpy as np
from keras import ops
from keras.src.backend import get_keras_mask  # Keras passes `mask` only to a call with a single tensor

from kernels_xla.common.masks import documents, zero_outside
from kernels_xla.common.spec import Tensor


def padding_of(x: Tensor, padding_mask: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """The padding mask of `x`: `padding_mask` if given, else Keras' mask; None if there is neither.

    Args:
      x: `[b, n, ...]`, which may carry a mask of `keras.layers.Embedding(mask_zero=True)` or `keras.layers.Masking`.
      padding_mask: Bool `[b, n]`, True at real tokens; or None. Of numbers, 0 is padding, so an additive mask of 0 and
        -inf means the opposite here.
      mask: The `mask` argument that Keras passes to a layer's call; or None.

    Returns:
      Bool `[b, n]` or None.
    """
    if padding_mask is None:
        padding_mask = get_keras_mask(x) if mask is None else mask
    return None if padding_mask is None else ops.cast(padding_mask, "bool")


def zero_padding(
    x: Tensor,
    padding_mask: Tensor | None,
    segment_ids: Tensor | None = None,
    mask: Tensor | None = None,
    name: str = "padding_mask",
) -> tuple[Tensor, Tensor | None]:
    """`x` with zeros at padding, and its padding mask.

    A masked weight of 0 does not remove a NaN: 0 x NaN is NaN, in the output and in gradients. Zeros at the entrance
    keep whatever stands at padding out of every product.

    Args:
      x: `[b, n, d]`.
      padding_mask: See `padding_of`.
      segment_ids: Integers `[b, n]`, 0 at padding; or None.
      mask: See `padding_of`.
      name: What the caller calls its padding mask.

    Returns:
      `[b, n, d]`, and bool `[b, n]` or None.

    Raises:
      ValueError: A mask has another shape than `[b, n]`, or `segment_ids` are floats of 16 bits, which are rounded.
    """
    padding_mask = padding_of(x, padding_mask, mask)
    check_shape(name, padding_mask, x)
    check_shape("segment_ids", segment_ids, x)
    check_integers("segment_ids", segment_ids)
    ids = documents(padding_mask, segment_ids)
    return (x if ids is None else zero_outside(x, ops.expand_dims(ids > 0, -1))), padding_mask


def check_shape(name: str, mask: Tensor | None, x: Tensor) -> None:
    """Raises a ValueError unless a mask that is given has the shape `[b, n]`, as far as that is known."""
    if mask is None:
        return
    needed, got = tuple(x.shape[:2]), tuple(np.shape(mask))  # a mask may be a list
    if len(got) != 2 or any(a != b for a, b in zip(needed, got, strict=True) if None not in (a, b)):
        raise ValueError(f"{name} needs the shape [b, n] = {needed} of the text, got {got}")


def check_integers(name: str, numbers: Tensor | None) -> None:
    """Raises a ValueError for floats of 16 bits: Keras casts all floats of a layer's call to them, and rounds them."""
    if "float16" in str(getattr(numbers, "dtype", "")):
        raise ValueError(f"{name} need a dtype of integers, got {numbers.dtype}")
