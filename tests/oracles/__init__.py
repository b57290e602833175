"""The formulas of the kernels in float64 NumPy, one token at a time. They share no code with kernels_xla.

Each kernel has one file in `formulas`, named after it. The last function of the file is the formula. Its arguments have
the names and shapes of the kernel's. Outputs at padding are zero here and have no meaning.

`CASES` of a file are the keyword arguments of the kernel's test cases. Chunks are small, so that there are several. A
case that gives None for an input calls the kernel without it. `TIMED` are the keyword arguments for benchmarks, as in a
real model.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType

from tests.oracles import formulas


def _formula(module: ModuleType) -> Callable:
    own = [f for _, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
    return max(own, key=lambda function: function.__code__.co_firstlineno)


class _OfKernels(dict):
    """What the files have, by kernel. A kernel without a file raises a KeyError that says which one it needs."""

    def __missing__(self, kernel: str):
        needed = f"{formulas.__name__.replace('.', '/')}/{kernel}.py"
        raise KeyError(f"kernel {kernel!r} needs an oracle in {needed}, got no such file")


def _options(module: ModuleType, name: str):
    if not hasattr(module, name):
        file = module.__name__.replace(".", "/")
        raise AttributeError(f"{file}.py needs {name}, the kernel's options: see tests/oracles/__init__.py; got none")
    return getattr(module, name)


_NAMES = [module.name for module in pkgutil.iter_modules(formulas.__path__)]
_MODULES = {name: importlib.import_module(f"{formulas.__name__}.{name}") for name in _NAMES}
ORACLES = _OfKernels({name: _formula(module) for name, module in _MODULES.items()})
CASES = _OfKernels({name: _options(module, "CASES") for name, module in _MODULES.items()})
TIMED = _OfKernels({name: _options(module, "TIMED") for name, module in _MODULES.items()})
