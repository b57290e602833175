"""What several layers share: the paper's initialiser, projections, and the options of a layer as its config."""

import inspect
import itertools
from collections.abc import Callable

import keras
from keras import ops

from kernels_xla.common.accelerator import on_tpu
from kernels_xla.common.spec import Tensor


def normal() -> keras.initializers.Initializer:
    """N(0, 0.02), of every matrix in FLASH (its appendix), and here of all systems but where a layer says otherwise."""
    return keras.initializers.RandomNormal(0.0, 0.02)


def projection(layer: keras.layers.Layer, width: int, name: str, use_bias: bool = True) -> keras.layers.Dense:
    """A Keras Dense of `layer`, so that `enable_lora` and `quantize("int8")` reach it."""
    return keras.layers.Dense(
        width, use_bias=use_bias, kernel_initializer=normal(), dtype=layer.dtype_policy, name=name
    )


def parts_of(
    dense: keras.layers.Dense,
    x: Tensor,
    widths: list,
    activation: Callable[[Tensor], Tensor] = keras.activations.linear,
    rows: list | None = None,
) -> list:
    """The activation of the product of `x` with one kernel, cut into parts of `widths`.

    On a GPU one wide product is the faster, and one wide activation: its gradient is one pass. A TPU would copy the
    parts out of it, and their gradients back into it: there each part has a product of its own. Nor does XLA's compiler
    for it carry an activation's gradient through a change of shape: it computes it once for each shape in which it is
    read. So there each part gets its bias and its activation in the shape in which its gradient will be made.

    Args:
      dense: The projection.
      x: `[..., d]`.
      widths: Of the parts.
      activation: Elementwise.
      rows: That shape without its last axis, for each part; None for that of `x`.
    """
    ends = list(itertools.accumulate(widths))[:-1]
    if not on_tpu() or dense.quantization_mode:
        return ops.split(activation(dense(x)), ends, axis=-1)
    lead = ops.shape(x)[:-1]
    x, kernel = (ops.cast(tensor, dense.compute_dtype) for tensor in (x, dense.kernel))
    parts = [ops.matmul(x, part) for part in ops.split(kernel, ends, axis=-1)]
    rows = [lead] * len(parts) if rows is None else rows
    parts = [ops.reshape(part, (*to, part.shape[-1])) for part, to in zip(parts, rows, strict=True)]
    if dense.use_bias:
        bias = ops.split(ops.cast(dense.bias, dense.compute_dtype), ends)
        parts = [part + offset for part, offset in zip(parts, bias, strict=True)]
    return [ops.reshape(activation(part), (*lead, part.shape[-1])) for part in parts]


def check_activation(layer: keras.layers.Layer, name: str) -> None:
    """Raises a ValueError at construction, not in the first step, unless Keras has an activation of that name."""
    try:
        keras.activations.get(name)
    except ValueError:
        needed = "the name of a Keras activation, as 'gelu' or 'silu'"
        raise ValueError(f"{type(layer).__name__}: activation must be {needed}, got {name!r}") from None


def options(layer: keras.layers.Layer) -> dict:
    """The constructor's arguments, each kept by `layer` under its own name: what `get_config` adds to Keras'."""
    return {name: getattr(layer, name) for name in inspect.signature(type(layer)).parameters if name != "kwargs"}
