import numpy as np

from tests.oracles.common import texts

CASES = ({"queries": 8, "seed": 0},)
TIMED = {"queries": 128, "seed": 0}


def informer(q, k, v, *, queries, seed, padding_mask=None):
    """Softmax attention for the tokens whose scores over a sample of keys stand out most; the mean value for others."""
    out, drawn = np.zeros(v.shape), np.random.default_rng(seed).integers(2**31 - 1, size=queries)
    for row, own in texts(v, padding_mask):
        for head in range(v.shape[2]):
            x, y, z = (part[row, own, head] for part in (q, k, v))
            scores = x @ y.T / np.sqrt(q.shape[-1])
            sampled = scores[:, drawn % len(own)]
            standing = sampled.max(axis=1) - sampled.sum(axis=1) / len(own)
            found = np.tile(z.mean(axis=0), (len(own), 1))
            for i in np.argsort(-standing)[:queries]:
                found[i] = np.exp(scores[i]) / np.exp(scores[i]).sum() @ z
            out[row, own, head] = found
    return out
