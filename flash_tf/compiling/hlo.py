"""Reads the HLO that TensorFlow exports, for the XLA of JAX. Needs NumPy and JAX, and no TensorFlow.

It uses private parts of jaxlib, which move between versions. It was tried with jax 0.10.2 and 0.11.2.
"""

import dataclasses
import re
from collections.abc import Iterator

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jaxlib import xla_client
from jaxlib.mlir import ir


@dataclasses.dataclass(frozen=True)
class Program:
    """A program before it is compiled for a device.

    Attributes:
      bytecode: MLIR for the compiler.
      text: The same program as StableHLO text.
      parameters: Shape and dtype of each argument, in order.
      replaces: Number of a result -> number of the argument whose buffer it takes over.
    """

    bytecode: bytes
    text: str
    parameters: tuple[tuple[tuple[int, ...], np.dtype], ...]
    replaces: dict[int, int]


def load(serialized: bytes) -> Program:
    """Reads the result of `experimental_get_compiler_ir(...)(stage="hlo_serialized")`.

    Removes the `mhlo.copy` operations that TensorFlow puts around variables: each would be a pass over memory.

    Raises:
      ValueError: The bytes are no HLO module.
    """
    try:
        computation = xla_client.XlaComputation(serialized)
        shapes = computation.program_shape().parameter_shapes()
    except Exception as error:  # the class is private to jaxlib
        raise ValueError(f"it holds no HLO module: {' '.join(str(error).split())[:200]}") from None
    with mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.xla_computation_to_mlir_module(computation))
        for copy in [op for op in _walk(module.operation) if op.operation.name == "mhlo.copy"]:
            copy.operation.results[0].replace_all_uses_with(copy.operation.operands[0])
            copy.operation.erase()
        bytecode, text = mlir.module_to_bytecode(module), str(module)
    head = computation.as_hlo_text().split("entry_computation_layout")[0]
    replaces = {int(result): int(argument) for result, argument in re.findall(r"\{(\d+)\}: \((\d+),", head)}
    parameters = tuple((tuple(s.dimensions()), np.dtype(s.numpy_dtype())) for s in shapes)
    return Program(bytecode, text, parameters, replaces)


def _walk(operation) -> Iterator[ir.OpView]:
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op
                yield from _walk(op.operation)
