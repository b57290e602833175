"""Skyformer: what its three matrices give each token of each other, which may be negative."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, gaussian, heads, nearly_inverse, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder."""
    q, k, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 3))
    drawn = np.random.default_rng(mixer.seed).integers(2**31 - 1, size=mixer.landmarks) % (2 * len(x))
    few = np.concatenate([q, k], axis=1)[:, drawn]
    middle = gaussian(few, few) + 0.1 * np.eye(mixer.landmarks)
    root = 1 / np.sqrt(middle.sum(axis=-1))
    across = root[:, :, None] * root[:, None]
    weights = gaussian(q, few) @ (across * nearly_inverse(across * middle)) @ gaussian(few, k)
    out = together(weights @ v) @ array(mixer.out_projection.kernel)
    return [Part("attention", weights, visible(len(x), causal=False), out)]
