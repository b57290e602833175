import numpy as np

from tests.oracles.common import queries

CASES = ({},)
TIMED = {}


def kernelized_attention(q, k, v, *, padding_mask=None, segment_ids=None):
    """Σ_j exp(-|q_i - k_j|² / (2√s)) v_j over the tokens of i's document."""
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        for head in range(v.shape[2]):
            squares = ((k[row, own, head] - q[row, i, head]) ** 2).sum(axis=-1)
            out[row, i, head] = np.exp(-squares / (2 * np.sqrt(q.shape[-1]))) @ v[row, own, head]
    return out
