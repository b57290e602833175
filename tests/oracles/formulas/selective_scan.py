import numpy as np

from tests.oracles.common import queries

CASES = ({"chunk_size": 4, "channels": 8, "causal": True},)
TIMED = {"causal": True}


def selective_scan(
    x, dt, a, b, c, d, *, chunk_size=None, channels=None, causal=True, padding_mask=None, segment_ids=None
):
    """h_i = exp(Δ_i A) h_{i-1} + Δ_i x_i B_iᵀ over the real tokens of a document; y_i = h_i C_i + D x_i."""
    out, state = np.zeros(x.shape), np.zeros(a.shape)
    for row, i, own in queries(x, padding_mask, segment_ids):
        if i == own[0]:
            state = np.zeros(a.shape)
        state = np.exp(dt[row, i][:, None] * a) * state + np.outer(dt[row, i] * x[row, i], b[row, i])
        out[row, i] = state @ c[row, i] + d * x[row, i]
    return out
