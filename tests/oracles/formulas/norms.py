import numpy as np

CASES = ({}, {"epsilon": 1e-2})
TIMED = {}


def scale_norm(x, g, *, epsilon=1e-5):
    """g·x over the root mean square of each token `x [b, n, d]`, with epsilon inside the root."""
    out = np.zeros(x.shape)
    for row, i in np.ndindex(x.shape[:2]):
        out[row, i] = g * x[row, i] / np.sqrt(np.dot(x[row, i], x[row, i]) / x.shape[-1] + epsilon)
    return out
