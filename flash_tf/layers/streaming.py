"""Helpers of mixers that read a few tokens at a time."""

from collections.abc import Sequence

import keras
from keras import ops

from flash_tf.layers.states import Layout, counts
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.spec import Tensor

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def check_streams(mixer: keras.layers.Layer, obstacle: str | None) -> None:
    """Raises a ValueError if `mixer` cannot stream, for the reason `obstacle` or because it is not built."""
    name = type(mixer).__name__
    if obstacle is not None:
        raise ValueError(f"{name} cannot stream: {obstacle}")
    if not mixer.built:
        raise ValueError(f"{name} must be built before it streams")


def check_next(
    mixer: keras.layers.Layer, obstacle: str | None, x: Tensor, state: dict, valid: Tensor | None
) -> Tensor | None:
    """Gives `valid` as int32. Raises a ValueError if `mixer` cannot go on from this state with these tokens.

    Args:
      mixer: The mixer.
      obstacle: The reason why it cannot stream, or None.
      x: The next tokens, `[b, k, d]`.
      state: The state before them.
      valid: See `states.counts`.
    """
    check_streams(mixer, obstacle)
    name = type(mixer).__name__
    if len(x.shape) != 3 or x.shape[1] == 0:
        raise ValueError(f"{name} needs the next tokens as [b, k, d] with k of 1 or more, got {tuple(x.shape)}")
    if not isinstance(state, dict):
        raise ValueError(f"{name} needs a state of initial_state, got {type(state).__name__}")
    rows, got = x.shape[0], state["position"].shape[0] if "position" in state else "no such state"
    if None not in (rows, got) and rows != got:
        raise ValueError(f"{name} needs a state of initial_state for {rows} rows, got {got}")
    if not hasattr(mixer, "state_layout"):
        mixer.state_layout = Layout(lambda n: mixer.initial_state(1, n if mixer.grows else None))
    mixer.state_layout.check_entries(name, state, state)
    return counts(name, valid, rows, x.shape[1])


def check_capacity(mixer: keras.layers.Layer, capacity: int | None) -> None:
    """Raises a ValueError unless `capacity` is given exactly if the state of `mixer` grows with the text."""
    name = type(mixer).__name__
    if mixer.grows and (capacity is None or capacity < 1):
        needed = "has a state that grows with the text: it needs capacity, the most tokens of a row"
        raise ValueError(f"{name} {needed}, got {capacity}")
    if not mixer.grows and capacity is not None:
        raise ValueError(f"{name} has a state of constant size: it needs capacity None, got {capacity}")


def kept_dtype(mixer: keras.layers.Layer, dtype: str | None) -> str:
    """The dtype of the tokens that a state keeps: `dtype`, or the compute dtype.

    Raises:
      ValueError: It is no dtype of numbers with a fraction, or wider than the compute dtype, which would gain nothing.
    """
    own = mixer.compute_dtype
    found = own if dtype is None else keras.backend.standardize_dtype(dtype)
    if BYTES.get(found, 9) > BYTES.get(own, 8):
        name = type(mixer).__name__
        raise ValueError(
            f"{name} computes in {own}: its state needs that or a narrower one of {', '.join(BYTES)}, got {found}"
        )
    return found


def next_positions(position: Tensor, tokens: int) -> Tensor:
    """Positions of the next tokens, int32 `[b, k]`, after `position [b]` tokens of each row."""
    return position[:, None] + ops.arange(tokens, dtype="int32")


def joined(kind: str, states: Sequence[dict]) -> dict:
    """Several states as one flat dictionary: `<kind>_<i>/<name>`, and the shared `position` once."""
    named = {f"{kind}_{i}/{k}": x for i, own in enumerate(states) for k, x in own.items() if k != "position"}
    return {**named, "position": states[0]["position"]}


def split(kind: str, state: dict, count: int) -> list[dict]:
    """The inverse of `joined`: a list of `count` states."""
    states = [{"position": state["position"]} for _ in range(count)]
    for key, x in state.items():
        if key != "position":
            of, name = key.removeprefix(f"{kind}_").split("/", 1)
            states[int(of)][name] = x
    return states


def normalized(norm: keras.layers.Layer, x: Tensor) -> Tensor:
    """`norm(x)` for `[b, k, d]`, with a layer norm in the form that XLA compiles into the fewest kernels.

    XLA fuses the two passes of this form into one kernel, but not the passes of Keras' form. It does not fuse the two
    passes over a single vector, so there the mean and the mean square share one pass.
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
