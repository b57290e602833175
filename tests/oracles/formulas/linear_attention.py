import numpy as np

from tests.oracles.common import queries

CASES = (
    *(
        {"chunk_size": c, "causal": causal, "normalized": normalized}
        for c in (4, 16)
        for causal in (False, True)
        for normalized in (False, True)
    ),
    *({"form": form, "causal": True, "normalized": True} for form in ("cumsum", "matmul")),
)
TIMED = {"causal": True, "normalized": True}


def linear_attention(
    q, k, v, *, chunk_size=None, form=None, causal=False, normalized=False, padding_mask=None, segment_ids=None
):
    """Σ_j (q_i·k_j) v_j, from the state Σ_j k_j v_jᵀ; if normalized, divided by Σ_j q_i·k_j."""
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        keys = [j for j in own if j <= i] if causal else own
        for head in range(v.shape[2]):
            state = sum(np.outer(k[row, j, head], v[row, j, head]) for j in keys)
            total = q[row, i, head] @ k[row, keys, head].sum(axis=0) if normalized else 1.0
            out[row, i, head] = q[row, i, head] @ state / total
    return out
