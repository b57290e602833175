import numpy as np

from tests.oracles.common import queries

CASES = ({"causal": False}, {"causal": True})
TIMED = {"causal": True}


def softmax_plus(q, k, v, *, causal=False, padding_mask=None, segment_ids=None):
    """Σ_j exp(λ_i q_i·k_j/√s) · v_j / Σ_j exp(λ_i q_i·k_j/√s), with λ_i the logarithm of N_i to the base 512."""
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        keys = [j for j in own if j <= i] if causal else own
        sharpness = np.log(len(keys)) / np.log(512) / np.sqrt(q.shape[-1])
        for head in range(v.shape[2]):
            weights = np.exp(sharpness * (k[row, keys, head] @ q[row, i, head]))
            out[row, i, head] = weights @ v[row, keys, head] / weights.sum()
    return out
