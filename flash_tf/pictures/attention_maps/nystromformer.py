"""Nystromformer: what its three matrices give each token of each other, which may be negative."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, nearly_inverse, softmax, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder."""
    q, k, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 3))
    segment = np.arange(len(x)) * mixer.landmarks // len(x)
    mean = (np.unique(segment)[:, None] == segment).astype("float64")
    mean /= mean.sum(axis=-1, keepdims=True)
    few_q, few_k = mean @ q, mean @ k
    middle = nearly_inverse(softmax(few_q, few_k, True))
    weights = softmax(q, few_k, True) @ middle @ softmax(few_q, k, True)
    out = together(weights @ v) @ array(mixer.out_projection.kernel)
    return [Part("attention", weights, visible(len(x), causal=False), out)]
