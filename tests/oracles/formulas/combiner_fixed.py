import numpy as np

from tests.oracles.common import queries

CASES = ({"chunk_size": 4, "causal": True}, {"chunk_size": 4, "causal": False})
TIMED = {"chunk_size": 256, "causal": True}


def attended(query, keys, values):
    weights = np.exp(keys @ query / np.sqrt(len(query)))
    return weights @ values / weights.sum()


def combiner_fixed(q, k, v, *, chunk_size, causal=False, padding_mask=None, segment_ids=None):
    """Softmax over the tokens of i's chunk and one key and value for each other chunk; if causal, each earlier chunk.

    These cover the tokens of i's document: their maximal key, and the result of attention with their maximal query.
    """
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        own_chunk = i // chunk_size
        near = [j for j in own if j // chunk_size == own_chunk and (j <= i or not causal)]
        far = sorted({j // chunk_size for j in own} - {own_chunk})
        members = [[j for j in own if j // chunk_size == g] for g in far if g < own_chunk or not causal]
        for head in range(v.shape[2]):
            keys, values = list(k[row, near, head]), list(v[row, near, head])
            for there in members:
                highest_query = q[row, there, head].max(axis=0)
                keys.append(k[row, there, head].max(axis=0))
                values.append(attended(highest_query, k[row, there, head], v[row, there, head]))
            out[row, i, head] = attended(q[row, i, head], np.array(keys), np.array(values))
    return out
