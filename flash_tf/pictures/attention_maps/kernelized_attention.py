"""Kernelized attention: a Gaussian of the distance, in several heads."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, gaussian, heads, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder. Its weights do not add up to one."""
    q, k, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 3))
    weights = gaussian(q, k)
    out = together(weights @ v) @ array(mixer.out_projection.kernel)
    return [Part("attention", weights, visible(len(x), causal=False), out)]
