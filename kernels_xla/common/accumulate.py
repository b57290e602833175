"""Sums in float32, whatever the dtype of the inputs.

`keras.ops.einsum` returns bfloat16 for bfloat16 inputs, which loses precision in a sum over thousands of tokens.
"""

import keras
from keras import ops

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
