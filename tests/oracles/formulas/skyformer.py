import numpy as np

from tests.oracles.common import inverse, texts

CASES = ({"landmarks": 8, "seed": 0},)
TIMED = {"landmarks": 128, "seed": 0}


def kernel(x, y):
    squares = np.array([[((a - b) ** 2).sum() for b in y] for a in x])
    return np.exp(-squares / (2 * np.sqrt(x.shape[-1])))


def skyformer(q, k, v, *, landmarks, seed, padding_mask=None):
    """K(q, S) (K(S, S) + 0.1)⁻¹ K(S, k) v. S is drawn from the text's queries and keys."""
    out, drawn = np.zeros(v.shape), np.random.default_rng(seed).integers(2**31 - 1, size=landmarks)
    for row, own in texts(v, padding_mask):
        for head in range(v.shape[2]):
            both = np.concatenate([q[row, own, head], k[row, own, head]])
            few = both[drawn % len(both)]
            middle = kernel(few, few) + 0.1 * np.eye(landmarks)
            scale = np.diag(1 / np.sqrt(middle.sum(axis=-1)))
            middle = scale @ inverse(scale @ middle @ scale) @ scale
            weights = kernel(q[row, own, head], few) @ middle @ kernel(few, k[row, own, head])
            out[row, own, head] = weights @ v[row, own, head]
    return out
