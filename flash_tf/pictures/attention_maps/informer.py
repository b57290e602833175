"""Informer: softmax of the tokens that attend, and the same weight of all tokens for the others."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, softmax, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder."""
    n = len(x)
    q, k, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 3))
    drawn = np.random.default_rng(mixer.seed).integers(2**31 - 1, size=mixer.queries) % n
    scores = q @ np.swapaxes(k[:, drawn], -1, -2) / np.sqrt(q.shape[-1])
    standing = scores.max(axis=-1) - scores.sum(axis=-1) / n
    rank = np.argsort(np.argsort(-standing, axis=-1), axis=-1)
    weights = np.where((rank < mixer.queries)[..., None], softmax(q, k, True), 1 / n)
    out = together(weights @ v) @ array(mixer.out_projection.kernel)
    return [Part("attention", weights, visible(n, causal=False), out)]
