import numpy as np

from tests.oracles.common import rotate

CASES = ({}, {"base": 100.0})
TIMED = {}


def rotary(x, positions, *, base=10000.0):
    """Every token `x [b, n, h, s]` turned by its own position `[b, n]`."""
    out = np.zeros(x.shape)
    for row, i in np.ndindex(positions.shape):
        out[row, i] = rotate(x[row, i], float(positions[row, i]), base)
    return out
