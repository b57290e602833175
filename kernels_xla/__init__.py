"""Pure tensor functions on `keras.ops`: shapes in, shapes out. No weights, no configuration, no TensorFlow.

A *kernel* is a module in this folder that defines `SPEC`. `specs()` finds all kernels for the contract tests and the
benchmarks. A new file is therefore tested and timed without being listed.
"""

import importlib
import pkgutil

from kernels_xla.common.spec import KernelSpec


def specs() -> dict[str, KernelSpec]:
    """Returns every kernel below this folder, keyed by name, in alphabetical order."""
    modules = (importlib.import_module(m.name) for m in pkgutil.walk_packages(__path__, f"{__name__}."))
    found = [module.SPEC for module in modules if "SPEC" in vars(module)]
    return {spec.name: spec for spec in sorted(found, key=lambda spec: spec.name)}
