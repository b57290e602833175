"""The formulas of the kernels in float64 NumPy, one token at a time. Shares no code or idea with kernels_xla.

Arguments are named and shaped as the kernels' own. Outputs at padding are zero here, and mean nothing there.
"""

import numpy as np


def rotate(x, position, base=10000.0):
    """Rotary position embedding: channel pairs (f, f + w/2) of `x [..., w]` as complex numbers, turned by p·θ_f."""
    half = x.shape[-1] // 2
    angle = position * base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rotary(x, positions, *, base=10000.0):
    """Every token `x [b, n, h, s]` turned by its own position `[b, n]`."""
    out = np.zeros(x.shape)
    for row, i in np.ndindex(positions.shape):
        out[row, i] = rotate(x[row, i], float(positions[row, i]), base)
    return out


def scaled_sin(positions, width, scale):
    """`[n, width]`: scale · (sin pθ, cos pθ), θ_f = 10000^(-f / (width/2))."""
    angle = np.outer(positions, 10000.0 ** (-np.arange(width // 2) / (width // 2)))
    return scale * np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


def scale_norm(x, g, *, epsilon=1e-5):
    """g·x over the root mean square of each token `x [b, n, d]`, epsilon inside the root."""
    out = np.zeros(x.shape)
    for row, i in np.ndindex(x.shape[:2]):
        out[row, i] = g * x[row, i] / np.sqrt(np.dot(x[row, i], x[row, i]) / x.shape[-1] + epsilon)
    return out


def quadratic(
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
):
    """Σ_j relu²(q_i·k_j/√s + bias_ij)/N · v_j, or with the scale inside: Σ_j relu²(q_i·k_j/N + bias_ij) · v_j."""
    out = np.zeros(v.shape)
    for row, i, own in _queries(v, padding_mask, segment_ids):
        keys = [j for j in own if j <= i] if causal else own
        count = {"position": len(keys), "length": len(own)}.get(divisor, divisor)
        for head in range(v.shape[2]):
            content = k[row, keys, head] @ q[row, i, head]
            weights = _relu2(content, _bias(a, b, i, keys), scale, q.shape[-1], count)
            out[row, i, head] = weights @ v[row, keys, head]
    return out


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
    for row, i, own in _queries(v, padding_mask, segment_ids):
        chunk = i // chunk_size
        near = [j for j in own if j // chunk_size == chunk and (j <= i or not causal)]
        far = [j for j in own if j // chunk_size < chunk] if causal else own
        offsets = np.array(near) % chunk_size
        content = k_quad[row, near] @ q_quad[row, i]
        weights = _relu2(content, _bias(a, b, i % chunk_size, offsets), scale, q_quad.shape[-1], chunk_size)
        out[row, i] = weights @ v[row, near]
        if far:
            out[row, i] += (k_lin[row, far] @ q_lin[row, i]) @ v[row, far] / len(far)
    return out


def softmax(q, k, v, *, causal=False, padding_mask=None, segment_ids=None):
    """Σ_j exp(q_i·k_j/√s) · v_j / Σ_j exp(q_i·k_j/√s)."""
    out = np.zeros(v.shape)
    for row, i, own in _queries(v, padding_mask, segment_ids):
        keys = [j for j in own if j <= i] if causal else own
        for head in range(v.shape[2]):
            weights = np.exp(k[row, keys, head] @ q[row, i, head] / np.sqrt(q.shape[-1]))
            out[row, i, head] = weights @ v[row, keys, head] / weights.sum()
    return out


def linear(q, k, v, *, chunk_size=None, causal=False, normalized=False, padding_mask=None, segment_ids=None):
    """Σ_j (q_i·k_j) v_j, as the state Σ_j k_j v_jᵀ read by q_i; normalized, over Σ_j q_i·k_j."""
    out = np.zeros(v.shape)
    for row, i, own in _queries(v, padding_mask, segment_ids):
        keys = [j for j in own if j <= i] if causal else own
        for head in range(v.shape[2]):
            state = sum(np.outer(k[row, j, head], v[row, j, head]) for j in keys)
            total = q[row, i, head] @ k[row, keys, head].sum(axis=0) if normalized else 1.0
            out[row, i, head] = q[row, i, head] @ state / total
    return out


def decayed(q, k, v, log_decay, *, chunk_size=None, causal=True, padding_mask=None, segment_ids=None):
    """`gated` with one decay for all channels of a head."""
    gates = np.repeat(log_decay[..., None], q.shape[-1], axis=-1)
    return gated(q, k, v, gates, padding_mask=padding_mask, segment_ids=segment_ids)


def gated(q, k, v, log_decay, *, chunk_size=None, causal=True, padding_mask=None, segment_ids=None):
    """S_i = diag(exp a_i) S_{i-1} + k_i v_iᵀ over the real tokens of a document, read by q_i."""
    out, state = np.zeros(v.shape), np.zeros([v.shape[2], k.shape[-1], v.shape[-1]])
    for row, i, own in _queries(v, padding_mask, segment_ids):
        if i == own[0]:
            state = np.zeros(state.shape)
        for head in range(v.shape[2]):
            decay = np.exp(log_decay[row, i, head])
            state[head] = decay[:, None] * state[head] + np.outer(k[row, i, head], v[row, i, head])
            out[row, i, head] = q[row, i, head] @ state[head]
    return out


def block(q, k, v, *, chunk_size, causal=False, weights="softmax", padding_mask=None, segment_ids=None):
    """Over the own block's tokens of the own document: `softmax`, or Σ_j relu(q_i·k_j/√s) v_j."""
    out = np.zeros(v.shape)
    for row, i, own in _queries(v, padding_mask, segment_ids):
        keys = [j for j in own if j // chunk_size == i // chunk_size and (j <= i or not causal)]
        for head in range(v.shape[2]):
            scores = k[row, keys, head] @ q[row, i, head] / np.sqrt(q.shape[-1])
            found = np.exp(scores) / np.exp(scores).sum() if weights == "softmax" else np.maximum(scores, 0)
            out[row, i, head] = found @ v[row, keys, head]
    return out


ORACLES = {
    "block": block,
    "decayed": decayed,
    "gated": gated,
    "linear": linear,
    "mixed_chunk": mixed_chunk,
    "norms": scale_norm,
    "quadratic": quadratic,
    "rotary": rotary,
    "softmax": softmax,
}


def _queries(v, padding_mask, segment_ids):
    """Yields every real token as (row, i, the real tokens of its document, itself among them)."""
    document = np.ones(v.shape[:2], int) if segment_ids is None else np.array(segment_ids, int)
    if padding_mask is not None:
        document = np.where(padding_mask, document, 0)
    for row, i in np.argwhere(document > 0):
        yield row, i, [j for j in range(v.shape[1]) if document[row, j] == document[row, i]]


def _relu2(content, bias, scale, width, count):
    if scale == "normalized":
        return np.maximum(content / np.sqrt(width) + bias, 0) ** 2 / count
    return np.maximum(content / count + bias, 0) ** 2


def _bias(a, b, i, keys):
    """RoPE_i(a)·RoPE_j(b) for every key j; zero without parameters."""
    if a is None:
        return 0.0
    return np.array([rotate(a, i) @ rotate(b, j) for j in keys])
