"""BigBird: softmax over the blocks beside, both ends of the text, and the random blocks."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, softmax, together

PERIOD = 1024  # blocks, after which the random ones repeat


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder."""
    q, k, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 3))
    block = np.arange(len(x)) // mixer.chunk_size
    query, key, last = block[:, None], block[None], block[-1]
    drawn = np.random.default_rng(mixer.seed).integers(2**31 - 1, size=PERIOD * mixer.random_blocks)
    drawn = drawn.reshape(PERIOD, -1)[block % PERIOD] % (last + 1)  # [n, random_blocks]
    seen = (np.abs(query - key) <= 1) | (drawn[..., None] == block).any(axis=1)
    for end in (0, last):
        seen |= (query == end) | (key == end)
    weights = softmax(q, k, seen)
    return [Part("attention", weights, seen, together(weights @ v) @ array(mixer.out_projection.kernel))]
