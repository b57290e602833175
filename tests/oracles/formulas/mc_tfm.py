import numpy as np

from tests.oracles.common import queries

CASES = ({"chunk_size": 4, "causal": True}, {"chunk_size": 4, "causal": False})
TIMED = {"chunk_size": 256, "causal": True}


def mc_tfm(q, k, v, lin_q, lin_k, *, chunk_size, causal=False, padding_mask=None, segment_ids=None):
    """Softmax over the tokens of i's document in i's chunk, plus Σ_j (q_lin_i·k_lin_j)/N · v_j across chunks.

    If causal, the second sum takes the N tokens of the document in earlier chunks, else all its N tokens.
    """
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        near = [j for j in own if j // chunk_size == i // chunk_size and (j <= i or not causal)]
        far = [j for j in own if j // chunk_size < i // chunk_size or not causal]
        for head in range(v.shape[2]):
            weights = np.exp(k[row, near, head] @ q[row, i, head] / np.sqrt(q.shape[-1]))
            out[row, i, head] = weights @ v[row, near, head] / weights.sum()
            for j in far:
                out[row, i, head] += lin_q[row, i, head] @ lin_k[row, j, head] / len(far) * v[row, j, head]
    return out
