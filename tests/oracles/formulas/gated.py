import numpy as np

from tests.oracles.common import queries


def gated(q, k, v, log_decay, *, chunk_size=None, causal=True, padding_mask=None, segment_ids=None):
    """S_i = diag(exp a_i) S_{i-1} + k_i v_iᵀ over the real tokens of a document, read by q_i."""
    out, state = np.zeros(v.shape), np.zeros([v.shape[2], k.shape[-1], v.shape[-1]])
    for row, i, own in queries(v, padding_mask, segment_ids):
        if i == own[0]:
            state = np.zeros(state.shape)
        for head in range(v.shape[2]):
            decay = np.exp(log_decay[row, i, head])
            state[head] = decay[:, None] * state[head] + np.outer(k[row, i, head], v[row, i, head])
            out[row, i, head] = q[row, i, head] @ state[head]
    return out
