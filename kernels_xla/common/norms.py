"""Normalizers that the papers use and Keras lacks.

Source: Nguyen and Salazar, "Transformers without Tears", arXiv:1910.05895. The epsilon stands inside the root, as in
FLASH's appendix.
"""

from keras import ops

from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.spec import KernelSpec, Tensor

SIMPLE_EPSILON = 1e-16  # of `simple_rms_norm`


def scale_norm(x: Tensor, g: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """ScaleNorm: y = g x / sqrt(mean(x^2) + epsilon), one learned length for every vector.

    Args:
      x: `[..., d]`.
      g: The length, a scalar.
      epsilon: Added to the mean square. It keeps the zero vector at zero.

    Returns:
      `[..., d]`, in the dtype of `x`.

    Cost:
      O(n d), one pass.

    Precision:
      Statistics and product in float32.
    """
    wide = ops.cast(x, sum_dtype(x))
    y = ops.cast(g, wide.dtype) * wide * ops.rsqrt(ops.mean(ops.square(wide), axis=-1, keepdims=True) + epsilon)
    return ops.cast(y, x.dtype)


def simple_rms_norm(x: Tensor) -> Tensor:
    """`x / (||x|| / sqrt(d))`, `[..., d]`: TransNormer's norm (arXiv:2210.10340), which learns nothing.

    The paper adds 1e-8 outside the root, where the gradient at the zero vector is NaN. We add 1e-16 inside the root,
    which gives the same result for all other vectors.
    """
    return scale_norm(x, 1.0, epsilon=SIMPLE_EPSILON)


def scale_norm_reference(x, g, *, epsilon=1e-5):
    """The formula, with a division."""
    return g * x / ops.sqrt(ops.mean(x * x, axis=-1, keepdims=True) + epsilon)


SPEC = KernelSpec(
    name="norms",
    fast=scale_norm,
    reference=scale_norm_reference,
    stream=None,
    inputs={"x": "bnd", "g": ""},
    flops=lambda sizes, case: 4 * sizes["b"] * sizes["n"] * sizes["d"],
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=(),
    tokenwise=True,
)
