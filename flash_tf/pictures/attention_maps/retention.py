"""Retention: products of queries and keys, times what their head has not forgotten."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, heads, rotated, silu, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder. The norm of each head is over what its weights give."""
    d, at = mixer.width, np.arange(len(x))
    q, k, v, gate = cut(x @ array(mixer.in_projection.kernel), [d, d, 2 * d, 2 * d])
    q, k, v = (heads(part, mixer.heads) for part in (q, k, v))
    turn = (lambda x: rotated(x, mixer.rope_theta)) if mixer.rope_theta else _turned
    q, k, seen = turn(q), turn(k) / np.sqrt(d // mixer.heads), visible(len(x), True)
    gamma = (1 - 2.0 ** (-5 - np.arange(mixer.heads)))[:, None, None]
    weights = (q @ np.swapaxes(k, -1, -2)) * gamma ** np.maximum(at[:, None] - at, 0) * seen
    out = weights @ v
    out = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + mixer.norm_epsilon)
    out = out if mixer.scale is None else out * array(mixer.scale)
    return [Part("attention", weights, seen, (silu(gate) * together(out)) @ array(mixer.out_projection.kernel))]


def _turned(x):
    """Every token of `x [h, n, s]` turned by its position; the angles fall evenly in their logarithm to 1 / 10000."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.outer(np.arange(x.shape[1]), 10_000.0 ** -np.linspace(0, 1, half)))
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)
