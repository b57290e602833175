import numpy as np

from tests.oracles.common import inverse, texts

CASES = ({"landmarks": 4}, {"landmarks": 12})
TIMED = {"landmarks": 128}


def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)


def nystromformer(q, k, v, *, landmarks, padding_mask=None):
    """softmax(q K) inverse(softmax(Q K)) softmax(Q k) v. Q and K are means over segments of the real tokens."""
    out = np.zeros(v.shape)
    for row, own in texts(v, padding_mask):
        # Token a of m starts segment t where a reaches t·m / landmarks.
        borders = [-(-t * len(own) // landmarks) for t in range(landmarks + 1)]
        parts = [own[a:b] for a, b in zip(borders, borders[1:], strict=False) if a < b]
        for head in range(v.shape[2]):
            x, y = q[row, own, head] / np.sqrt(q.shape[-1]), k[row, own, head]
            few_x = np.array([q[row, part, head].mean(axis=0) for part in parts]) / np.sqrt(q.shape[-1])
            few_y = np.array([k[row, part, head].mean(axis=0) for part in parts])
            middle = inverse(softmax(few_x @ few_y.T))
            out[row, own, head] = softmax(x @ few_y.T) @ middle @ softmax(few_x @ y.T) @ v[row, own, head]
    return out
