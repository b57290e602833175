import numpy as np

from tests.oracles.common import texts

CASES = ({"chunk_size": 4, "buckets": 4, "rounds": 2, "seed": 0},)
TIMED = {"chunk_size": 64, "buckets": 64, "rounds": 2, "seed": 0}


def reformer(q, v, *, chunk_size, buckets, rounds, seed, padding_mask=None):
    """Softmax over the other tokens of two chunks of the text sorted by bucket. All rounds share one normalizer."""
    out = np.zeros(v.shape)
    drawn = np.random.default_rng(seed).normal(size=(q.shape[-1], rounds, buckets // 2))
    for row, own in texts(v, padding_mask):
        for head in range(v.shape[2]):
            x, y = q[row, own, head], v[row, own, head]
            keys = x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6 * x.shape[-1])
            above, below = np.zeros([len(own), y.shape[-1]]), np.zeros([len(own), 1])
            for turn in range(rounds):
                turned = x @ drawn[:, turn]
                bucket = np.concatenate([turned, -turned], axis=-1).argmax(axis=-1)
                line = sorted(range(len(own)), key=lambda i: (bucket[i], i))  # noqa: B023
                for place, i in enumerate(line):
                    chunk = place // chunk_size
                    beside = [j for j in line[max(chunk - 1, 0) * chunk_size : (chunk + 1) * chunk_size] if j != i]
                    weights = np.exp(keys[beside] @ x[i])
                    above[i] += weights @ y[beside]
                    below[i] += weights.sum()
                    if len(own) == 1:  # there is no other token
                        above[i], below[i] = y[i], 1
            out[row, own, head] = above / below
    return out
