"""Transformer-LS: a window's tokens, and what the sums over the text, or over its segments, hold of each token."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, softmax, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The sum over the window, and the sum over the normalized landmarks; see the folder."""
    h, n, c, r = mixer.heads, len(x), mixer.chunk_size, mixer.landmarks
    q, k, v = cut(dense(mixer.in_projection, x), [mixer.width] * 3)
    q, k, v = (heads(part, h) for part in (q, _normalized(mixer.near_norm, k), _normalized(mixer.near_norm, v)))
    at = np.arange(n)
    own = at // c if mixer.causal else np.zeros(n, int)  # what is summed together
    first = at[:, None] // c * c - (c if mixer.causal else c // 2)
    near = (at >= first) & (at < first + 2 * c) & visible(n, mixer.causal)
    far = np.full((n, n), not mixer.causal) | (own < own[:, None])
    # A sum of r for every segment: `[h, segments r, n]`, each of its tokens alone.
    weight = np.exp(heads(x @ array(mixer.landmark_projection.kernel), h))  # [h, n, r]
    share = np.concatenate([np.swapaxes(weight * (own == g)[:, None], -1, -2) for g in range(own[-1] + 1)], axis=1)
    share /= share.sum(axis=-1, keepdims=True)
    far_k, far_v = (heads(_normalized(mixer.far_norm, together(share @ part)), h) for part in (k, v))
    sees = np.repeat(far[:, np.unique(own, return_index=True)[1]], r, axis=1)  # a segment as its first token
    weights = softmax(q, np.concatenate([k, far_k], axis=1), np.concatenate([near, sees], axis=1))
    local, distant = weights[:, :, :n], weights[:, :, n:]
    leave = lambda out: together(out) @ array(mixer.out_projection.kernel)  # noqa: E731
    return [
        Part("local", local, near, leave(local @ v)),
        Part("global", distant @ share, far, leave(distant @ far_v)),
    ]


def _normalized(norm, x):
    """The layer norm of `[n, d]`."""
    centred = x - x.mean(axis=-1, keepdims=True)
    centred /= np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + norm.epsilon)
    return centred * array(norm.gamma) + array(norm.beta)
