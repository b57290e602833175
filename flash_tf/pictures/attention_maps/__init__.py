"""The attention weights of mixers as maps, computed again from a layer's weights: one file a mixer, named as it is.

A file `<registered name of the mixer>.py` has one function, `parts(mixer, x)`: a built layer, and what it is called
with for one text, float64 `[n, d]` -> a list of `Part`. What they put out, added up, with the bias of the layer's
`out_projection` if it has one, is what the layer puts out; the tests hold each to that. A mixer without a file can do
everything but be looked at.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """A sum over tokens that a mixer's output is made of.

    Attributes:
      name: "local", "global", or "attention" where there is but one.
      weights: What query i takes of token j, `[h, i, j]`; 0 where it does not see it.
      seen: Whether it sees it, `[i, j]`.
      output: What the part adds to the layer's output, `[n, d]`.
    """

    name: str
    weights: np.ndarray
    seen: np.ndarray
    output: np.ndarray


def of(name: str) -> Callable[..., list[Part]]:
    """The function of the mixer that configs call `name`.

    Raises:
      ValueError: When it has none.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in known:
        raise ValueError(f"mixer {name!r} has no maps to draw: {__name__} has those of {', '.join(known)}")
    return importlib.import_module(f"{__name__}.{name}").parts
