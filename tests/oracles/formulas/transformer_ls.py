import numpy as np

from tests.oracles.common import texts

CASES = ({"chunk_size": 4},)
TIMED = {"chunk_size": 64}


def normalized(x, scale, offset):
    """Layer norm of `[h, s]`."""
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * scale + offset


def transformer_ls(q, k, v, scores, k_scale, k_offset, v_scale, v_offset, *, chunk_size, padding_mask=None):
    """One softmax over a window's tokens and normalized sums over the text. Each sum has softmax weights."""
    out = np.zeros(v.shape)
    for row, own in texts(v, padding_mask):
        weights = np.exp(scores[row, own]) / np.exp(scores[row, own]).sum(axis=0)  # [n, h, r]
        far_k, far_v = [], []
        for t in range(scores.shape[-1]):
            share = weights[..., t, None]
            far_k.append(normalized((share * k[row, own]).sum(axis=0), k_scale, k_offset))
            far_v.append(normalized((share * v[row, own]).sum(axis=0), v_scale, v_offset))
        for i in own:
            first = i // chunk_size * chunk_size - chunk_size // 2
            near = [j for j in own if first <= j < first + 2 * chunk_size]
            for head in range(v.shape[2]):
                keys = [*k[row, near, head], *(x[head] for x in far_k)]
                found = np.exp(np.array(keys) @ q[row, i, head] / np.sqrt(q.shape[-1]))
                out[row, i, head] = found / found.sum() @ np.array([*v[row, near, head], *(x[head] for x in far_v)])
    return out
