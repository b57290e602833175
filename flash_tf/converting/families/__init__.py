"""Public architectures, one file each, named after `model_type` in the public config.json.

A family has:

- `LIBRARY`: where the architecture comes from.
- `ARCHITECTURE`: the name of its class there.
- `MODEL`: the class here.
- `HEAD`: the name of the head's matrix there.
- `FIXED`: options of the public config with the only value that we compute, which is also the default there.
- `IGNORED`: a regular expression of tensors that hold no weights.
- `PREFIX`: how names start in a model with a head; the library saves a model without one without it.
- `options(public)`: the options of `MODEL` for a public config.
- `public(model)`: the public config of a model that `options` could have made.
- `entries(model)`: an `Entry` for each variable of a built model.
"""

import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """Every `model_type` that there is a file for."""
    return sorted(file.name for file in pkgutil.iter_modules(__path__))


def get(name: str) -> ModuleType:
    """The family of a `model_type`; ValueError with the known ones if there is none."""
    if name not in names():
        raise ValueError(f"no architecture is called {name!r}; the known ones are {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")
