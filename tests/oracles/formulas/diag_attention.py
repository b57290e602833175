import numpy as np

from tests.oracles.common import queries

CASES = tuple(
    {"chunk_size": c, "causal": causal, "weights": weights}
    for c in (4, 16)
    for causal in (False, True)
    for weights in ("softmax", "relu")
)
TIMED = {"chunk_size": 64, "causal": True}


def diag_attention(q, k, v, *, chunk_size, causal=False, weights="softmax", padding_mask=None, segment_ids=None):
    """Over the tokens of i's document in i's block: `softmax_attention`, or Σ_j relu(q_i·k_j/√s) v_j."""
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        keys = [j for j in own if j // chunk_size == i // chunk_size and (j <= i or not causal)]
        for head in range(v.shape[2]):
            scores = k[row, keys, head] @ q[row, i, head] / np.sqrt(q.shape[-1])
            found = np.exp(scores) / np.exp(scores).sum() if weights == "softmax" else np.maximum(scores, 0)
            out[row, i, head] = found @ v[row, keys, head]
    return out
