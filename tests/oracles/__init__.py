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


_NAMES = [module.name for module in pkgutil.iter_modules(formulas.__path__)]
_MODULES = {name: importlib.import_module(f"{formulas.__name__}.{name}") for name in _NAMES}
ORACLES = {name: _formula(module) for name, module in _MODULES.items()}
CASES = {name: module.CASES for name, module in _MODULES.items()}
TIMED = {name: module.TIMED for name, module in _MODULES.items()}
