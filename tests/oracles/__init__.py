"""The formulas of the kernels in float64 NumPy, one token at a time. They share no code with kernels_xla.

Each kernel has one file in `formulas`, named after it. The last function of the file is the formula. Its arguments have
the names and shapes of the kernel's. Outputs at padding are zero here and have no meaning.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable

from tests.oracles import formulas


def _formula(name: str) -> Callable:
    module = importlib.import_module(f"{formulas.__name__}.{name}")
    own = [f for _, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
    return max(own, key=lambda function: function.__code__.co_firstlineno)


ORACLES = {module.name: _formula(module.name) for module in pkgutil.iter_modules(formulas.__path__)}
