"""The Transformer's: softmax, or squared ReLU, over all tokens, in several heads."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import (
    array,
    cut,
    dense,
    heads,
    rotated,
    sharpened,
    silu,
    softmax,
    squared_relu,
    together,
    visible,
)


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder."""
    q, k, v, *gate = cut(dense(mixer.in_projection, x), mixer.widths)
    s = mixer.width // mixer.heads
    q, k, v = (heads(part, part.shape[-1] // s) for part in (q, k, v))
    k, v = (np.repeat(part, len(q) // len(part), axis=0) for part in (k, v))
    if mixer.rotary:
        q, k = (rotated(part, mixer.rope_theta) for part in (q, k))
    seen = visible(len(x), mixer.causal)
    if mixer.kernel == "softmax_plus":
        q = sharpened(q, seen)
    if mixer.kernel != "relu2":
        weights = softmax(q, k, seen)
    else:
        weights = squared_relu(q, k, 0.0, seen.sum(axis=1, keepdims=True), "normalized") * seen
    attended = together(weights @ v) * (silu(gate[0]) if gate else 1.0)
    return [Part("attention", weights, seen, attended @ array(mixer.out_projection.kernel))]
