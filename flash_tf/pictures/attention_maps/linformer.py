"""Linformer: softmax over mixed keys, times what each mixes of each token, which may be negative."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, softmax, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder."""
    q, k, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 3))
    mixing = array(mixer.mixing)[:, :, : len(x)]
    weights = softmax(q, mixing @ k, True) @ mixing
    out = together(weights @ v) @ array(mixer.out_projection.kernel)
    return [Part("attention", weights, visible(len(x), causal=False), out)]
