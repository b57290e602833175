"""FLASH-Quad: squared ReLU, or softmax, over all tokens, in one head or several."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import GatedUnit, heads, rotated, sharpened, softmax, squared_relu, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder."""
    unit, n = GatedUnit(mixer, x), len(x)
    q, k = (rotated(heads(unit.head(name), mixer.heads)) for name in ("q", "k"))
    seen = visible(n, mixer.causal)
    if mixer.kernel == "softmax_plus":
        q = sharpened(q, seen)
    if mixer.kernel != "relu2":
        weights = softmax(q, k, seen)
    else:
        tokens = {"position": seen.sum(axis=1, keepdims=True), "length": n}.get(mixer.divisor, mixer.divisor)
        weights = squared_relu(q, k, unit.bias, tokens, mixer.scale) * seen
    return [Part("attention", weights, seen, unit.leave(together(weights @ heads(unit.v, mixer.heads))))]
