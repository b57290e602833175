import numpy as np

from tests.oracles.common import bias, queries, relu2

CASES = ({"chunk_size": 4, "causal": True}, {"chunk_size": 4, "causal": False})
TIMED = {"chunk_size": 256, "causal": True}


def flash_weighted(
    quad_q,
    quad_k,
    lin_q,
    lin_k,
    sum_q,
    sum_k,
    v,
    a=None,
    b=None,
    *,
    chunk_size,
    causal=False,
    scale="normalized",
    padding_mask=None,
    segment_ids=None,
):
    """`gau` inside i's chunk, plus for each visible chunk h A_h times the mean over h of (q_lin_i·k_lin_j) v_j.

    A_h ∝ N_h exp(q̄·k̄_h/√s). k̄_h is the mean of sum_k over the document's N_h tokens in chunk h. If causal, the
    earlier chunks are visible, and q̄ is the mean of sum_q over the chunk just before. Otherwise all chunks are
    visible, and q̄ is the mean over i's chunk.
    """
    out, width = np.zeros(v.shape), quad_q.shape[-1]
    for row, i, own in queries(v, padding_mask, segment_ids):
        members = {}
        for j in own:
            members.setdefault(j // chunk_size, []).append(j)
        chunk = i // chunk_size
        near = [j for j in members[chunk] if j <= i or not causal]
        weights = relu2(quad_k[row, near] @ quad_q[row, i], bias(a, b, i, near), scale, width, chunk_size)
        out[row, i] = weights @ v[row, near]
        asks = members.get(chunk - 1 if causal else chunk, [])
        query = sum_q[row, asks].mean(axis=0) if asks else np.zeros(width)
        seen = [there for h, there in members.items() if h < chunk or not causal]
        scores = [query @ sum_k[row, there].mean(axis=0) / np.sqrt(width) for there in seen]
        mass = np.array([len(there) * np.exp(score) for there, score in zip(seen, scores, strict=True)])
        for there, weight in zip(seen, mass / mass.sum(), strict=True):
            out[row, i] += weight * np.mean([(lin_q[row, i] @ lin_k[row, j]) * v[row, j] for j in there], axis=0)
    return out
