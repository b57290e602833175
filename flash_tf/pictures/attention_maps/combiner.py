"""Combiner: softmax over the tokens of a chunk and summaries of other chunks, in several heads."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, rotated, softmax, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The chunk, and what is taken of the tokens of other chunks by way of their summaries; see the folder."""
    q, k, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 3))
    if mixer.rotary:
        q, k = rotated(q), rotated(k)
    n, at = len(x), np.arange(len(x))
    chunk, column, order = at // mixer.chunk_size, at % mixer.chunk_size, visible(n, mixer.causal)
    inside = chunk[:, None] == chunk
    # Of each token as a summary: its key, what it takes of each token, and who sees it.
    if mixer.summaries == "axial":
        takes = softmax(q, k, inside)
        mixed = _plain_norm(x + dense(mixer.summary_in, together(takes @ v)))
        keys = heads(dense(mixer.summary_out, mixed), mixer.heads)
        keys = rotated(keys) if mixer.rotary else keys
        far = order & ~inside & (column[:, None] == column)
    else:
        highest = lambda part: np.stack([part[:, inside[i]].max(axis=1) for i in range(n)], axis=1)  # noqa: E731
        takes, keys = softmax(highest(q), k, inside), highest(k)
        far = order & ~inside & (column == 0)  # a chunk has one summary, and the first token stands for it
    weights = softmax(q, np.concatenate([k, keys], axis=1), np.concatenate([inside & order, far], axis=1))
    near, far = weights[..., :n], weights[..., n:] @ takes
    out = array(mixer.out_projection.kernel)
    return [
        Part("local", near, inside & order, together(near @ v) @ out),
        Part("global", far, order & ~inside, together(far @ v) @ out),
    ]


def _plain_norm(x):
    """A layer norm without weights."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)
