"""Writes kernels as the StableHLO programs that TensorFlow's XLA runs on an NVIDIA GPU.

    python -m kernels_pallas.lower FOLDER '{"NAME.mlir": ["scan", "Scan", {SIZES}], ...}'

It runs with the JAX of `requirements/pallas.txt`, in an environment of its own and without a GPU.
"""

import json
import os
import sys

import jax
from jax import export

from kernels_pallas import sizes
from kernels_pallas.launching import launch


def program(name: str, m: sizes.Sizes) -> bytes:
    """The program of one kernel."""
    shapes = [jax.ShapeDtypeStruct(*shape) for shape in m.arguments(name)]
    allowed = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    run = jax.jit(lambda *given: launch(name, m, *given))
    return export.export(run, platforms=["cuda"], disabled_checks=allowed)(*shapes).mlir_module_serialized


def main(folder: str, wanted: str) -> None:
    """Writes the programs; each file is whole or not there."""
    jax.config.update("jax_platforms", "cpu")
    for file, (name, kind, given) in json.loads(wanted).items():
        path = os.path.join(folder, file)
        m = getattr(sizes, kind)(**{key: tuple(x) if isinstance(x, list) else x for key, x in given.items()})
        partial = f"{path}.{os.getpid()}"
        with open(partial, "wb") as f:
            f.write(program(name, m))
        os.replace(partial, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
