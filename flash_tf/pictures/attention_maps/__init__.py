"""Attention maps of mixers, recomputed from a layer's weights: one file a mixer, named after it.

A file `<registered name of the mixer>.py` has one function, `parts(mixer, x)`. It takes a built layer and its input for
one text, float64 `[n, d]`, and returns a list of `Part`. The outputs of the parts add up to the layer's output without
the bias of `out_projection`, and the tests check this. A mixer without a file works everywhere except in
`flash-tf inspect`.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """One sum over tokens; a mixer's output is the sum of its parts.

    Attributes:
      name: "local", "global", or "attention" if there is only one.
      weights: The weight of token j for query i, `[h, i, j]`; 0 if the query does not see the token.
      seen: Whether query i sees token j, `[i, j]`.
      output: The part's contribution to the layer's output, `[n, d]`.
    """

    name: str
    weights: np.ndarray
    seen: np.ndarray
    output: np.ndarray


def of(name: str) -> Callable[..., list[Part]]:
    """The `parts` function of the mixer with the registered name `name`.

    Raises:
      ValueError: The mixer has no attention maps.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in known:
        raise ValueError(f"mixer {name!r} has no attention maps; these mixers have: {', '.join(known)}")
    return importlib.import_module(f"{__name__}.{name}").parts
