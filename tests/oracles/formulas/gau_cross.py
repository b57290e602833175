import numpy as np

CASES = ({},)
TIMED = {}


def gau_cross(q, k, v, *, padding_mask=None, memory_mask=None):
    """Σ_j relu(q_i·k_j/√s)²/N · v_j over the N real tokens j of the memory."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for row, i, head in np.ndindex(q.shape[:3]):
        keys = [j for j in range(k.shape[1]) if memory_mask is None or memory_mask[row, j]]
        if padding_mask is not None and not padding_mask[row, i]:
            continue
        for j in keys:
            score = q[row, i, head] @ k[row, j, head] / np.sqrt(q.shape[-1])
            out[row, i, head] += max(score, 0) ** 2 / len(keys) * v[row, j, head]
    return out
