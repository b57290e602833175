import numpy as np

from tests.oracles.common import bias, queries, relu2


def mixed_chunk(
    q_quad,
    k_quad,
    q_lin,
    k_lin,
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
    """`quadratic` among the own document's tokens of the own chunk, plus Σ_j (q_lin_i·k_lin_j)/N · v_j across chunks.

    The second sum takes the N tokens of the document in earlier chunks if causal, and all its N tokens otherwise.
    """
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        chunk = i // chunk_size
        near = [j for j in own if j // chunk_size == chunk and (j <= i or not causal)]
        far = [j for j in own if j // chunk_size < chunk] if causal else own
        offsets = np.array(near) % chunk_size
        content = k_quad[row, near] @ q_quad[row, i]
        weights = relu2(content, bias(a, b, i % chunk_size, offsets), scale, q_quad.shape[-1], chunk_size)
        out[row, i] = weights @ v[row, near]
        if far:
            out[row, i] += (k_lin[row, far] @ q_lin[row, i]) @ v[row, far] / len(far)
    return out
