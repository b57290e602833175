"""What mixers share to be fed a few tokens at a time."""

from collections.abc import Sequence

import keras
from keras import ops

from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.spec import Tensor


def check_streams(mixer: keras.layers.Layer, obstacle: str | None) -> None:
    """Raises a ValueError unless `mixer` is built and has no obstacle, which says why it cannot stream."""
    if obstacle is not None:
        raise ValueError(f"{type(mixer).__name__} cannot stream: {obstacle}")
    if not mixer.built:
        raise ValueError(f"{type(mixer).__name__} must be built before it streams: its width is not known")


def check_capacity(mixer: keras.layers.Layer, capacity: int | None) -> None:
    """Raises a ValueError unless `capacity` is given exactly where the state of `mixer` grows with the text."""
    name = type(mixer).__name__
    if mixer.grows and (capacity is None or capacity < 1):
        needed = "keeps more for a longer text: it needs capacity, the most tokens of a row"
        raise ValueError(f"{name} {needed}, got {capacity}")
    if not mixer.grows and capacity is not None:
        raise ValueError(f"{name} keeps no more for a longer text: it needs capacity None, got {capacity}")


def next_positions(position: Tensor, tokens: int) -> Tensor:
    """Positions of the next tokens, int32 `[b, k]`, of rows that have had `position` `[b]`."""
    return position[:, None] + ops.arange(tokens, dtype="int32")


def joined(kind: str, states: Sequence[dict]) -> dict:
    """States as one, flat: `<kind>_<i>/<name>` for each, and once, of the first, the `position` that all have."""
    named = {f"{kind}_{i}/{k}": x for i, own in enumerate(states) for k, x in own.items() if k != "position"}
    return {**named, "position": states[0]["position"]}


def split(kind: str, state: dict, count: int) -> list[dict]:
    """The `count` states of `joined`, in their order."""
    states = [{"position": state["position"]} for _ in range(count)]
    for key, x in state.items():
        if key != "position":
            of, name = key.removeprefix(f"{kind}_").split("/", 1)
            states[int(of)][name] = x
    return states


def normalized(norm: keras.layers.Layer, x: Tensor) -> Tensor:
    """`norm(x)` of `[b, k, d]`; a layer norm in the form that XLA compiles into fewest kernels.

    It joins the two passes of the usual form, and not those of Keras, into one kernel; but those of a single vector it
    does not join, for which the mean square is taken in the pass of the mean.
    """
    if not isinstance(norm, keras.layers.LayerNormalization):
        return norm(x)
    wide = ops.cast(x, sum_dtype(x))
    mean = ops.mean(wide, axis=-1, keepdims=True)
    if tuple(x.shape[:2]) == (1, 1):
        variance = ops.mean(ops.square(wide), axis=-1, keepdims=True) - ops.square(mean)
    else:
        variance = ops.mean(ops.square(wide - mean), axis=-1, keepdims=True)
    y = (wide - mean) * ops.rsqrt(variance + norm.epsilon) * ops.cast(norm.gamma, wide.dtype)
    return ops.cast(y if norm.beta is None else y + ops.cast(norm.beta, wide.dtype), norm.compute_dtype)
