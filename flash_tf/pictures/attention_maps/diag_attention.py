"""DiagAttention: softmax or ReLU among the tokens of a block, in several heads."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, learned, softmax, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder. With `attention: relu` the output's norm is over what all weights give."""
    q, k, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 3))
    if mixer.lrpe:
        q, k = (learned(mixer.turn, part) for part in (q, k))
    block = np.arange(len(x)) // mixer.chunk_size
    seen = visible(len(x), mixer.causal) & (block[:, None] == block)
    if mixer.attention == "softmax":
        weights = softmax(q, k, seen)
    else:
        weights = np.maximum(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]), 0) * seen
    out = together(weights @ v)
    if mixer.attention == "relu":
        out = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + 1e-16)
    return [Part("attention", weights, seen, out @ array(mixer.out_projection.kernel))]
