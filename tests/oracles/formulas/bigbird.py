import numpy as np

from tests.oracles.common import texts

CASES = ({"chunk_size": 4, "random_blocks": 1, "seed": 0},)
TIMED = {"chunk_size": 64, "random_blocks": 3, "seed": 0}


def bigbird(q, k, v, *, chunk_size, random_blocks, seed, padding_mask=None):
    """Softmax over the tokens of i's block, its neighbours, both end blocks and drawn blocks. End blocks see all."""
    out = np.zeros(v.shape)
    drawn = np.random.default_rng(seed).integers(2**31 - 1, size=1024 * random_blocks)
    for row, own in texts(v, padding_mask):
        last = own.max() // chunk_size
        for i in own:
            block = i // chunk_size
            start = block % 1024 * random_blocks
            seen = {block - 1, block, block + 1, 0, last, *(drawn[start : start + random_blocks] % (last + 1))}
            keys = [j for j in own if j // chunk_size in seen or block in (0, last)]
            for head in range(v.shape[2]):
                scores = k[row, keys, head] @ q[row, i, head] / np.sqrt(q.shape[-1])
                out[row, i, head] = np.exp(scores) / np.exp(scores).sum() @ v[row, keys, head]
    return out
