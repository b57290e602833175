import numpy as np

from tests.oracles.common import queries

CASES = ({"causal": True},)
TIMED = {"causal": True}


def convolution(x, weights, bias, *, causal=True, padding_mask=None, segment_ids=None):
    """Σ_l weights[w-1-l]·x_{i-l} plus the bias, over the real tokens of the document with l < w."""
    out, width = np.zeros(x.shape), len(weights)
    for row, i, own in queries(x, padding_mask, segment_ids):
        out[row, i] = bias + sum(weights[width - 1 - (i - j)] * x[row, j] for j in own if 0 <= i - j < width)
    return out
