import numpy as np

from tests.oracles.common import queries

CASES = ({"chunk_size": 4, "causal": True}, {"chunk_size": 4, "causal": False})
TIMED = {"chunk_size": 256, "causal": True}


def combiner_axial(q, k, v, k_sum, v_sum, *, chunk_size, causal=False, padding_mask=None, segment_ids=None):
    """Softmax over the tokens of i's chunk and its column's summaries in other chunks; if causal, in earlier chunks."""
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        before = [j for j in own if j <= i] if causal else own
        near = [j for j in before if j // chunk_size == i // chunk_size]
        far = [j for j in before if j // chunk_size != i // chunk_size and (j - i) % chunk_size == 0]
        for head in range(v.shape[2]):
            keys = np.concatenate([k[row, near, head], k_sum[row, far, head]])
            weights = np.exp(keys @ q[row, i, head] / np.sqrt(q.shape[-1]))
            values = np.concatenate([v[row, near, head], v_sum[row, far, head]])
            out[row, i, head] = weights @ values / weights.sum()
    return out
