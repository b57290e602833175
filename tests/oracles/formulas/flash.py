import numpy as np

from tests.oracles.common import bias, queries, relu2

LOCAL_ONLY = {"lin_q": None, "lin_k": None}
GLOBAL_ONLY = {"quad_q": None, "quad_k": None, "a": None, "b": None}
CASES = (
    *({"chunk_size": 16, "causal": causal} for causal in (False, True)),
    *(
        {"chunk_size": 4, "causal": causal, **options}
        for causal in (False, True)
        for options in ({}, {"scale": "paper_appendix"}, {"overlapping": True}, LOCAL_ONLY, GLOBAL_ONLY)
    ),
    *({"chunk_size": 4, "causal": causal, "chunk_divisor": True, "b": None} for causal in (False, True)),
    *({"chunk_size": 4, "causal": False, "first_to_all": rows} for rows in ("cls", "chunks")),
)
TIMED = {"chunk_size": 256, "causal": True}


def flash(
    quad_q,
    quad_k,
    lin_q,
    lin_k,
    v,
    a=None,
    b=None,
    *,
    chunk_size,
    causal=False,
    scale="normalized",
    overlapping=False,
    first_to_all="none",
    chunk_divisor=False,
    padding_mask=None,
    segment_ids=None,
):
    """`gau` over the tokens of i's document in i's chunk, plus Σ_j (q_lin_i·k_lin_j)/N · v_j across chunks.

    If causal, the second sum takes the N tokens of the document in earlier chunks, else all its N tokens. With a chunk
    divisor, N is the size of a chunk. If overlapping, the first sum also takes the chunk before, and it divides by the
    size of two chunks. A sum without queries is left out. The first token of each chunk, or of each text that starts a
    chunk, may receive the softmax of its `gau` scores over its whole document instead.
    """
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        starts = i == 0 or (segment_ids is not None and segment_ids[row, i - 1] != segment_ids[row, i])
        if i % chunk_size == 0 and (first_to_all == "chunks" or (first_to_all == "cls" and starts)):
            scores = np.exp(quad_k[row, own] @ quad_q[row, i] / np.sqrt(quad_q.shape[-1]))
            out[row, i] = scores @ v[row, own] / scores.sum()
            continue
        chunk = i // chunk_size
        first = chunk - 1 if overlapping else chunk
        near = [j for j in own if first <= j // chunk_size <= chunk and (j <= i or not causal)]
        far = [j for j in own if j // chunk_size < chunk] if causal else own
        if quad_q is not None:
            content = quad_k[row, near] @ quad_q[row, i]
            size = chunk_size * (2 if overlapping else 1)
            weights = relu2(content, bias(a, b, i, near), scale, quad_q.shape[-1], size)
            out[row, i] = weights @ v[row, near]
        if lin_q is not None and far:
            out[row, i] += (lin_k[row, far] @ lin_q[row, i]) @ v[row, far] / (chunk_size if chunk_divisor else len(far))
    return out
