"""The formulas of the kernels in float64 NumPy, one token at a time. Shares no code or idea with kernels_xla.

One file a kernel in `formulas`, named after it, whose last function is the formula. Arguments are named and shaped as
the kernels' own. Outputs at padding are zero here, and mean nothing there.
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
