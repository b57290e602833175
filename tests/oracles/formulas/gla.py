import numpy as np

from tests.oracles.common import queries

CASES = ({"chunk_size": 4, "causal": True}, {"chunk_size": 32, "causal": True})
TIMED = {"causal": True, "value_log_decay": None}


def gla(
    q,
    k,
    v,
    log_decay=None,
    value_log_decay=None,
    *,
    chunk_size=None,
    causal=True,
    padding_mask=None,
    segment_ids=None,
):
    """S_i = (exp a_i ⊗ exp b_i) * S_{i-1} + k_i v_iᵀ over the real tokens of a document. q_i reads S_i."""
    a = np.zeros(k.shape) if log_decay is None else log_decay
    b = np.zeros(v.shape) if value_log_decay is None else value_log_decay
    out, state = np.zeros(v.shape), np.zeros([v.shape[2], k.shape[-1], v.shape[-1]])
    for row, i, own in queries(v, padding_mask, segment_ids):
        if i == own[0]:
            state = np.zeros(state.shape)
        for head in range(v.shape[2]):
            decay = np.outer(np.exp(a[row, i, head]), np.exp(b[row, i, head]))
            state[head] = decay * state[head] + np.outer(k[row, i, head], v[row, i, head])
            out[row, i, head] = q[row, i, head] @ state[head]
    return out
