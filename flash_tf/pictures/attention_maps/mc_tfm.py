"""MC-TFM++: softmax among the tokens of a chunk, and linear attention to the chunks before, or to all tokens."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, rotated, softmax, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The sum inside the chunk, and the sum across chunks over the tokens that it takes; see the folder."""
    q, k, v = cut(dense(mixer.in_projection, x), [mixer.width] * 3)
    linear = [_scaled(part, made) for part, made in ((q, mixer.query_scale), (k, mixer.key_scale))]
    q, k, lin_q, lin_k, v = (heads(part, mixer.heads) for part in (q, k, *linear, v))
    if mixer.rotary:
        q, k, lin_q, lin_k = (rotated(part) for part in (q, k, lin_q, lin_k))
    n = len(x)
    chunk = np.arange(n) // mixer.chunk_size
    inside = (chunk[:, None] == chunk) & visible(n, mixer.causal)
    across = chunk < chunk[:, None] if mixer.causal else np.ones((n, n), bool)
    near = softmax(q, k, inside)
    far = lin_q @ np.swapaxes(lin_k, -1, -2) / np.maximum(across.sum(axis=1, keepdims=True), 1) * across
    out = array(mixer.out_projection.kernel)
    return [
        Part("local", near, inside, together(near @ v) @ out),
        Part("global", far, across, together(far @ v) @ out),
    ]


def _scaled(x, made):
    """What an `OffsetScale` of one head makes of `x`."""
    return x * array(made.scales[0]) + array(made.offsets[0])
