import numpy as np

CASES = ({}, {"query": True})
TIMED = {}


def random_features(x, directions, *, query=False):
    """exp(w·x′ - |x′|²/2) of every row w of `directions [r, s]`, x′ = x/⁴√s. A query's: 10⁶ · it / its largest."""
    out = np.zeros([*x.shape[:3], len(directions)])
    for at in np.ndindex(x.shape[:3]):
        short = x[at] / x.shape[-1] ** 0.25
        exponents = np.array([w @ short - short @ short / 2 for w in directions])
        out[at] = 1e6 * np.exp(exponents - exponents.max()) if query else np.exp(exponents)
    return out
