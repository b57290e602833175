"""Sums in float32, whatever the dtype of the inputs.

`keras.ops.einsum` returns bfloat16 for bfloat16 inputs, which loses precision in a sum over thousands of tokens.
"""

import keras
from keras import ops

from kernels_xla.common import nvidia
from kernels_xla.common.spec import Tensor


def sum_dtype(x: Tensor) -> str:
    """The dtype of sums over `x`: float64 for float64, else float32."""
    return "float64" if str(keras.backend.standardize_dtype(x.dtype)) == "float64" else "float32"


def einsum(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """`ops.einsum` of two tensors of one dtype, summed and returned in `sum_dtype`.

    JAX multiplies bfloat16 inputs directly and accumulates in float32. TensorFlow has no such product outside XLA, and
    no gradient for the product inside XLA. There we cast the operands, and XLA fuses the casts into the product.
    """
    dtype = sum_dtype(x)
    if keras.config.backend() == "jax":
        import jax.numpy as jnp

        return jnp.einsum(equation, x, y, preferred_element_type=dtype)
    return ops.einsum(equation, ops.cast(x, dtype), ops.cast(y, dtype))


def weighted_sum(w: Tensor, x: Tensor) -> Tensor:
    """The sum over m of w x, in the dtype of `w`: `[..., m]`, `[..., m, e]` -> `[..., e]`, for one row of weights.

    XLA fuses the terms into their sum, and the sum into its neighbours. Without XLA the terms would be written, so
    there it is a product, in the dtype of `x`.
    """
    if nvidia.xla_compiles():
        return ops.sum(w[..., None] * ops.cast(x, w.dtype), axis=-2)
    return ops.cast(ops.einsum("...m,...me->...e", ops.cast(w, x.dtype), x), w.dtype)
