import numpy as np

from tests.oracles.common import queries

CASES = ({"chunk_size": 4, "causal": True},)
TIMED = {"chunk_size": 64, "causal": True}


def normalized(x, scale, offset):
    """Layer norm of `[h, s]`."""
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * scale + offset


def transformer_ls_causal(
    q,
    k,
    v,
    scores,
    k_scale,
    k_offset,
    v_scale,
    v_offset,
    *,
    chunk_size,
    causal=True,
    padding_mask=None,
    segment_ids=None,
):
    """One softmax over i's segment up to i, the segment before, and each earlier segment's normalized sums.

    A sum covers the segment's tokens of i's document. A softmax of their scores gives the weights.
    """
    assert causal
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        here = i // chunk_size
        near = [j for j in own if j <= i and j // chunk_size in (here - 1, here)]
        far_k, far_v = [], []
        for segment in sorted({j // chunk_size for j in own if j // chunk_size < here}):
            members = [j for j in own if j // chunk_size == segment]
            weights = np.exp(scores[row, members]) / np.exp(scores[row, members]).sum(axis=0)  # [m, h, r]
            for t in range(scores.shape[-1]):
                share = weights[..., t, None]
                far_k.append(normalized((share * k[row, members]).sum(axis=0), k_scale, k_offset))
                far_v.append(normalized((share * v[row, members]).sum(axis=0), v_scale, v_offset))
        for head in range(v.shape[2]):
            keys = np.array([*k[row, near, head], *(x[head] for x in far_k)])
            found = np.exp(keys @ q[row, i, head] / np.sqrt(q.shape[-1]))
            out[row, i, head] = found / found.sum() @ np.array([*v[row, near, head], *(x[head] for x in far_v)])
    return out
