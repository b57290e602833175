"""The gate of a gated linear unit, fused: bias, activation and product in one pass forward, and one backward."""

import math

import keras
from keras import ops

from kernels_pallas import programs
from kernels_pallas.sizes import Glu
from kernels_xla.common.spec import Tensor

KERNELS = ["glu", "glu_gradient"]
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
NARROWEST = 64  # columns of a program
MEASURED = (2048, "gelu", "bfloat16")  # width, activation and dtype of the models whose steps were timed
TOKENS = 65_536  # of the smallest of those steps


def gated(p: Tensor, bias: Tensor, *, activation: str) -> Tensor:
    """activation(gate) * value, for gate, value = p + bias.

    Args:
      p: The in-projection without its bias, `[..., 2e]`, bfloat16 or float32, of a static shape. The gate is first.
      bias: Its bias, `[2e]`.
      activation: One of `ACTIVATIONS`.

    Returns:
      `[..., e]`, in the dtype of `p`.

    Cost:
      Three tensors as wide as the values are read or written forward, and five backward. The bias's gradient is sums of
      64 tokens or, if 64 does not divide them all, of the power of 2 that does.

    Precision:
      All is float32 inside, and the results are rounded once. The normal distribution in "gelu" is exact to 1.5e-7. In
      bfloat16, sigmoids are exact to 2^-11.
    """
    m = sizes(tuple(p.shape), p.dtype, activation)
    given = ops.reshape(p, (m.tokens, 2 * m.hidden)), ops.cast(bias, "float32")
    out = ops.custom_gradient(lambda *given: _gated(m, *given))(*given)
    return ops.reshape(out, (*p.shape[:-1], m.hidden))


def sizes(shape: tuple, dtype, activation: str) -> Glu:
    """The sizes of the kernels for p of that `shape` `[..., 2e]`."""
    *lead, width = shape
    dtype = keras.backend.standardize_dtype(dtype)
    return Glu(tokens=math.prod(lead), hidden=width // 2, activation=activation, dtype=dtype)


def obstacle(m: Glu) -> str | None:
    """Why the fused kernels cannot run, or None."""
    known = m.dtype in ("bfloat16", "float32") and m.activation in ACTIVATIONS
    if not known or m.columns < NARROWEST or not m.tokens:
        needed = f"tokens in bfloat16 or float32, a hidden width that is a multiple of {NARROWEST}"
        got = f"{m.tokens:,} in {m.dtype}, a width of {m.hidden:,}, {m.activation}"
        return f"{needed}, and one of {', '.join(ACTIVATIONS)}, got {got}"
    return programs.obstacle(KERNELS, m)


def is_faster(m: Glu) -> bool:
    """Whether the fused kernels are faster than einsums, by what was measured: Transformer++ base, in TensorFlow."""
    measured = (m.hidden, m.activation, m.dtype) == MEASURED
    return keras.config.backend() == "tensorflow" and measured and m.tokens >= TOKENS and m.step == m.STEP


def _gated(m, p, bias):
    [y] = programs.run("glu", m, p, bias)

    def gradient(dy):
        dp, sums = programs.run("glu_gradient", m, p, bias, dy)
        return dp, ops.sum(sums, axis=0)

    return y, gradient
