import numpy as np

from tests.oracles.common import queries

CASES = ({"causal": False}, {"causal": True})
TIMED = {"causal": True}


def grouped_query_attention(q, k, v, *, causal=False, padding_mask=None, segment_ids=None):
    """Σ_j exp(q_i·k_j/√s) · v_j / Σ_j exp(q_i·k_j/√s), with k and v of the group that the query belongs to."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for row, i, own in queries(v, padding_mask, segment_ids):
        keys = [j for j in own if j <= i] if causal else own
        for group, query in np.ndindex(q.shape[2:4]):
            weights = np.exp(k[row, keys, group] @ q[row, i, group, query] / np.sqrt(q.shape[-1]))
            out[row, i, group, query] = weights @ v[row, keys, group] / weights.sum()
    return out
