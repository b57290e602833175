import numpy as np

from tests.oracles.common import queries

CASES = ({"causal": False}, {"causal": True})
TIMED = {"causal": True}


def softmax_attention(q, k, v, *, causal=False, padding_mask=None, segment_ids=None):
    """Σ_j exp(q_i·k_j/√s) · v_j / Σ_j exp(q_i·k_j/√s)."""
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        keys = [j for j in own if j <= i] if causal else own
        for head in range(v.shape[2]):
            weights = np.exp(k[row, keys, head] @ q[row, i, head] / np.sqrt(q.shape[-1]))
            out[row, i, head] = weights @ v[row, keys, head] / weights.sum()
    return out
