"""A norm in front of a residual branch, fused: one pass forward and one backward."""

import math

import keras
from keras import ops

from kernels_pallas import programs
from kernels_pallas.sizes import Norm
from kernels_xla.common.spec import Tensor

KERNELS = ["normalized", "norm_gradient"]
NARROWEST = 64  # columns of a tile
MOST = 16  # tiles of a token, each of 64 to 1,024 columns; a program holds them all
TOKENS = {512: 65_536, 768: 8_192, 1024: 65_536}  # by width, of the smallest step that was timed


def with_norm(x: Tensor, gamma: Tensor, beta: Tensor, *, centered: bool, epsilon: float) -> tuple[Tensor, Tensor]:
    """The tokens, and y = gamma (x - mean) / sqrt(var + epsilon) + beta of each token: what enters a residual block.

    Both have one backward pass. It adds the gradient through y to the gradient of x.

    Args:
      x: `[..., d]`, bfloat16 or float32, of a static shape.
      gamma: `[d]`.
      beta: `[d]`.
      centered: Whether the mean is subtracted. Without, var is the mean square, as in RMSNorm.
      epsilon: Added to var.

    Returns:
      x and y, `[..., d]`, in the dtype of `x`.

    Cost:
      Two tensors as large as x are read or written forward, and four backward, where einsums take three and eight. The
      parameters' gradients are sums of 64 tokens or, if 64 does not divide them all, of the power of 2 that does.

    Precision:
      Statistics and sums are float32. The two gradients of x are added before they are rounded.
    """
    m = sizes(tuple(x.shape), x.dtype, centered, epsilon)
    given = [ops.reshape(x, (m.tokens, m.width)), *(ops.cast(one, "float32") for one in (gamma, beta))]
    both = ops.custom_gradient(lambda *given: _with_norm(m, *given))(*given)
    return tuple(ops.reshape(one, x.shape) for one in both)


def sizes(shape: tuple, dtype, centered: bool, epsilon: float) -> Norm:
    """The sizes of the kernels for x of that `shape` `[..., d]`."""
    *lead, width = shape
    dtype = keras.backend.standardize_dtype(dtype)
    return Norm(tokens=math.prod(lead), width=width, dtype=dtype, centered=centered, epsilon=float(epsilon))


def obstacle(m: Norm) -> str | None:
    """Why the fused kernels cannot run, or None."""
    if m.dtype not in ("bfloat16", "float32") or m.columns < NARROWEST or m.width > MOST * m.columns:
        needed = f"a width of at most {MOST} times a power of 2 from {NARROWEST} to 1,024"
        return f"bfloat16 or float32, and {needed}, got {m.dtype}, a width of {m.width:,}"
    return programs.obstacle(KERNELS, m)


def is_faster(m: Norm) -> bool:
    """Whether the fused kernels are faster than einsums, by what was measured: bfloat16, in TensorFlow.

    Causal steps of 65,536 tokens, with LayerNorm, were faster by 3 % with a width of 768, and masked ones, with
    ScaleNorm, by 2 %. Causal steps of 8,192 to 32,768 tokens were faster with this kernel and FLASH's and the loss's
    together, and masked ones of 16,384 and 32,768 with this kernel and FLASH's. With widths of 512 and 1,024, causal
    steps of 65,536 tokens were.
    """
    whole = m.tokens >= TOKENS.get(m.width, math.inf) and m.step == m.STEP
    return keras.config.backend() == "tensorflow" and m.dtype == "bfloat16" and whole


def _with_norm(m, x, gamma, beta):
    [y] = programs.run("normalized", m, x, gamma, beta)

    def gradient(*arguments):  # JAX passes the gradients of several results as one tuple
        dx, dy = arguments[0] if len(arguments) == 1 else arguments
        dx, sums = programs.run("norm_gradient", m, x, gamma, dy, dx)
        return dx, *ops.unstack(ops.sum(sums, axis=0), axis=0)

    return (x, y), gradient
