"""Functions that several formulas share."""

import numpy as np


def rotate(x, position, base=10000.0):
    """Rotary position embedding: channel pairs (f, f + w/2) of `x [..., w]` as complex numbers, turned by p·θ_f."""
    half = x.shape[-1] // 2
    angle = position * base ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def scaled_sin(positions, width, scale):
    """`[n, width]`: scale · (sin pθ, cos pθ), θ_f = 10000^(-f / (width/2))."""
    angle = np.outer(positions, 10000.0 ** (-np.arange(width // 2) / (width // 2)))
    return scale * np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


def queries(v, padding_mask, segment_ids):
    """Yields every real token as (row, i, the real tokens of its document, itself among them)."""
    document = np.ones(v.shape[:2], int) if segment_ids is None else np.array(segment_ids, int)
    if padding_mask is not None:
        document = np.where(padding_mask, document, 0)
    for row, i in np.argwhere(document > 0):
        yield row, i, [j for j in range(v.shape[1]) if document[row, j] == document[row, i]]


def relu2(content, bias, scale, width, count):
    if scale == "normalized":
        return np.maximum(content / np.sqrt(width) + bias, 0) ** 2 / count
    return np.maximum(content / count + bias, 0) ** 2


def bias(a, b, i, keys):
    """RoPE_i(a)·RoPE_j(b) for every key j, or a number of `a` for each distance; zero without parameters."""
    if a is None:
        return 0.0
    if b is None:
        return np.array([a[len(a) // 2 + i - j] for j in keys])
    return np.array([rotate(a, i) @ rotate(b, j) for j in keys])


def texts(v, padding_mask):
    """Yields every row with real tokens as (row, positions of the real tokens)."""
    real = np.ones(v.shape[:2], bool) if padding_mask is None else np.array(padding_mask, bool)
    for row in range(len(real)):
        if real[row].any():
            yield row, np.flatnonzero(real[row])


def inverse(matrix):
    """Six steps of V ← ¼V(13 - KV(15 - KV(7 - KV))) from Kᵀ / (‖K‖₁‖K‖∞)."""
    one, found = np.eye(len(matrix)), matrix.T / (np.linalg.norm(matrix, 1) * np.linalg.norm(matrix, np.inf))
    for _ in range(6):
        kv = matrix @ found
        found = found @ (13 * one - kv @ (15 * one - kv @ (7 * one - kv))) / 4
    return found
