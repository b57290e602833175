import numpy as np

from tests.oracles.common import texts

CASES = ({},)
TIMED = {}


def linformer(q, k, v, projection, *, padding_mask=None):
    """softmax(q (E k) / √s) (E v), with the columns of E at the positions of real tokens."""
    out = np.zeros(v.shape)
    for row, own in texts(v, padding_mask):
        for head in range(v.shape[2]):
            mixing = projection[head][:, own]
            for i in own:
                scores = mixing @ k[row, own, head] @ q[row, i, head] / np.sqrt(q.shape[-1])
                out[row, i, head] = np.exp(scores) / np.exp(scores).sum() @ (mixing @ v[row, own, head])
    return out
