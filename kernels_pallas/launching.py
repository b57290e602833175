"""Runs Pallas kernels through Triton. It needs JAX alone.

One source lowers with JAX 0.7.0, whose programs TensorFlow 2.20 reads, and with later ones.
"""

import dataclasses
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels_pallas.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel runs.

    Attributes:
      kernel: Takes a reference to each argument, then one to each result.
      grid: Programs along each axis.
      warps: Of a program.
      stages: Of a program's loads ahead of their use.
      in_place: Results that take the memory of an argument: {argument: result}.
    """

    kernel: Callable
    grid: tuple[int, ...]
    warps: int
    stages: int = 1
    in_place: dict[int, int] = dataclasses.field(default_factory=dict)


def sigmoid(dtype: str, interpret: bool) -> Callable[[jax.Array], jax.Array]:
    """The logistic function; for 16 bits by the approximate hyperbolic tangent, exact to 2^-11, in one instruction."""
    tanh = jnp.tanh if interpret or dtype == "float32" else triton.approx_tanh
    return lambda x: 0.5 + 0.5 * tanh(0.5 * x)


def launch(name: str, m: Sizes, *given: jax.Array, interpret: bool = False) -> list[jax.Array]:
    """Runs a kernel.

    Args:
      name: One of the kernels that `plan` of the module `m.module` describes.
      m: Sizes.
      *given: Arrays of the shapes `m.arguments(name)`.
      interpret: Whether Pallas' interpreter runs it, on any machine.

    Returns:
      Arrays of the shapes `m.results(name)`.
    """
    plan = importlib.import_module(f"kernels_pallas.{m.module}").plan(name, m, interpret)
    options = (
        {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=plan.warps, num_stages=plan.stages)}
    )
    if not interpret and jax.__version_info__ < (0, 8):
        options["backend"] = "triton"
    call = pl.pallas_call(
        plan.kernel,
        grid=plan.grid,
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in m.results(name)],
        input_output_aliases=plan.in_place,
        interpret=interpret,
        name=name,
        **options,
    )
    return call(*given)
