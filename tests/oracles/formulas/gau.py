import numpy as np

from tests.oracles.common import bias, queries, relu2

CASES = tuple(
    {"causal": causal, **options}
    for causal in (False, True)
    for options in (
        {},
        {"divisor": 32},
        {"divisor": "length"},
        {"scale": "paper_appendix"},
        {"scale": "paper_appendix", "divisor": 32},
    )
)
TIMED = {"causal": True}


def gau(
    q,
    k,
    v,
    a=None,
    b=None,
    *,
    causal=False,
    scale="normalized",
    divisor="position",
    padding_mask=None,
    segment_ids=None,
    prefix_mask=None,
):
    """Σ_j relu²(q_i·k_j/√s + bias_ij)/N · v_j, or with the scale inside: Σ_j relu²(q_i·k_j/N + bias_ij) · v_j."""
    out = np.zeros(v.shape)
    for row, i, own in queries(v, padding_mask, segment_ids):
        early = lambda j: j <= i or (prefix_mask is not None and prefix_mask[row, j])  # noqa: E731, B023
        keys = [j for j in own if early(j)] if causal else own
        count = {"position": len(keys), "length": len(own)}.get(divisor, divisor)
        for head in range(v.shape[2]):
            content = k[row, keys, head] @ q[row, i, head]
            weights = relu2(content, bias(a, b, i, keys), scale, q.shape[-1], count)
            out[row, i, head] = weights @ v[row, keys, head]
    return out
