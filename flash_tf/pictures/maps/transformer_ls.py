"""Transformer-LS: a window's tokens, and what the sums over the text hold of each token."""

import numpy as np

from flash_tf.pictures.formulas import array, cut, dense, heads, together, visible
from flash_tf.pictures.maps import Part


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The window's sum, and that of the landmarks, whose values a norm has changed; see the folder."""
    h, n = mixer.heads, len(x)
    q, k, v = cut(dense(mixer.in_projection, x), [mixer.width] * 3)
    q, k, v = (heads(part, h) for part in (q, _normalised(mixer.near_norm, k), _normalised(mixer.near_norm, v)))
    share = heads(np.exp(x @ array(mixer.landmark_projection.kernel)), h)  # [h, n, r]
    share = np.swapaxes(share / share.sum(axis=1, keepdims=True), -1, -2)
    far_k, far_v = (heads(_normalised(mixer.far_norm, together(share @ part)), h) for part in (k, v))
    at = np.arange(n)
    first = at[:, None] // mixer.chunk_size * mixer.chunk_size - mixer.chunk_size // 2
    near = (at >= first) & (at < first + 2 * mixer.chunk_size)
    scores = q @ np.swapaxes(np.concatenate([k, far_k], axis=1), -1, -2) / np.sqrt(q.shape[-1])
    scores[:, :, :n] = np.where(near, scores[:, :, :n], -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    local, far = weights[:, :, :n], weights[:, :, n:]
    leave = lambda out: together(out) @ array(mixer.out_projection.kernel)  # noqa: E731
    return [
        Part("local", local, near, leave(local @ v)),
        Part("global", far @ share, visible(n, causal=False), leave(far @ far_v)),
    ]


def _normalised(norm, x):
    """The layer norm of `[n, d]`."""
    centred = x - x.mean(axis=-1, keepdims=True)
    centred /= np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + norm.epsilon)
    return centred * array(norm.gamma) + array(norm.beta)
