"""Helpers of several layers: the paper's initializer, projections, and a layer's options as its config."""

import functools
import itertools
import re
from collections.abc import Callable, Mapping

import keras
import numpy as np
from keras import ops
from keras.dtype_policies import DTypePolicyMap

from flash_tf.registry import named
from kernels_xla.common.accelerator import on_tpu
from kernels_xla.common.nvidia import whole_gradient
from kernels_xla.common.spec import Tensor

GELU_TANH = functools.partial(keras.activations.gelu, approximate=True)


def normal() -> keras.initializers.Initializer:
    """N(0, 0.02), from FLASH's appendix: the initializer of all matrices here unless a layer says otherwise."""
    return keras.initializers.RandomNormal(0.0, 0.02)


def projection(layer: keras.layers.Layer, width: int, name: str, use_bias: bool = True) -> keras.layers.Dense:
    """A Keras Dense of `layer`, so that `enable_lora` and `quantize("int8")` reach it."""
    return keras.layers.Dense(
        int(width), use_bias=use_bias, kernel_initializer=normal(), dtype=layer.dtype_policy, name=name
    )


def width_of(layer: keras.layers.Layer, x_shape: tuple) -> int:
    """The width d of an input `[..., d]`; a ValueError if it is not known."""
    if x_shape[-1] is None:
        raise ValueError(f"{type(layer).__name__} needs an input whose last dimension is known, got {tuple(x_shape)}")
    return x_shape[-1]


def parts_of(
    dense: keras.layers.Dense,
    x: Tensor,
    widths: list,
    activation: Callable[[Tensor], Tensor] = keras.activations.linear,
    shapes: list | None = None,
) -> list:
    """Projects `x` with one kernel, applies the activation, and splits the result into parts of `widths`.

    On a GPU, one wide product and one wide activation are fastest, because the gradient is one pass. A TPU would copy
    the parts out and their gradients back, so there each part has its own product. XLA:TPU does not fuse an
    activation's gradient across a reshape, so each part gets its bias and activation in the shape of its gradient.

    Args:
      dense: The projection.
      x: `[..., d]`.
      widths: Widths of the parts.
      activation: An elementwise function.
      shapes: For each part, the shape of its gradient without the last axis; None for the shape of `x`.

    Returns:
      A list of tensors `[..., width]`.
    """
    ends = list(itertools.accumulate(widths))[:-1]
    if not on_tpu() or dense.quantization_mode:
        return ops.split(activation(whole_gradient(dense(x))), ends, axis=-1)
    lead = ops.shape(x)[:-1]
    x, kernel = (ops.cast(tensor, dense.compute_dtype) for tensor in (x, dense.kernel))
    parts = [ops.matmul(x, part) for part in ops.split(kernel, ends, axis=-1)]
    shapes = [lead] * len(parts) if shapes is None else shapes
    parts = [ops.reshape(part, (*to, part.shape[-1])) for part, to in zip(parts, shapes, strict=True)]
    if dense.use_bias:
        bias = ops.split(ops.cast(dense.bias, dense.compute_dtype), ends)
        parts = [part + offset for part, offset in zip(parts, bias, strict=True)]
    return [ops.reshape(activation(part), (*lead, part.shape[-1])) for part in parts]


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name: Keras', or "gelu_tanh", GELU by a hyperbolic tangent as in GPT-2."""
    return GELU_TANH if name == "gelu_tanh" else keras.activations.get(name)


def check_activation(layer: keras.layers.Layer, name: str) -> None:
    """Raises a ValueError unless there is an activation of that name."""
    try:
        activation(name)
    except ValueError:
        needed = "the name of a Keras activation, as 'gelu' or 'silu', or 'gelu_tanh'"
        raise ValueError(f"{type(layer).__name__}: activation must be {needed}, got {name!r}") from None


def check_counts(layer: keras.layers.Layer, **counts: int | None) -> None:
    """Raises a ValueError unless each count is at least 1, or None."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{type(layer).__name__} needs {name} >= 1, got {count}")


def options(layer: keras.layers.Layer) -> dict:
    """The constructor's arguments, which `layer` keeps under the same names. `get_config` adds them to Keras' own.

    A subclass has its own arguments, and each of its `**kwargs` that a class of this package takes. It adds to
    `get_config` what it does not keep under the same name.
    """
    names = dict.fromkeys([*named(type(layer)), *layer.given_options])
    return {**{name: _plain(getattr(layer, name)) for name in names if hasattr(layer, name)}, **quantized(layer)}


def _plain(value):
    """A copy in Python's own types, so that an edit of a config leaves the layer as it is."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [_plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def quantized(layer: keras.layers.Layer) -> dict:
    """The `dtype` of a layer that holds quantized ones, by their paths; empty if there are none.

    With it the constructor makes those layers quantized, so that they can read their weights from a file. A path begins
    at the layer: what is around it when the file is loaded, a `keras.Sequential` say, may have no name yet.
    """
    own_policies(layer)
    inside = [one for one in layer._flatten_layers(include_self=False) if one.quantization_mode]
    if not inside:
        return {}
    around = layer.path.removesuffix(layer.name)
    policies = {f"(.*/)?{re.escape(one.path.removeprefix(around))}": one.dtype_policy for one in inside}
    return {"dtype": DTypePolicyMap(_policy(layer), policies)}


def own_policies(layer: keras.layers.Layer) -> None:
    """Gives each built layer inside its own policy in place of a map, with which Keras' Dense cannot be saved."""
    for one in layer._flatten_layers(include_self=False):
        if one.path:
            one._dtype_policy = _policy(one)


def _policy(layer):
    found = layer.dtype_policy
    return found[layer.path] if isinstance(found, DTypePolicyMap) else found
