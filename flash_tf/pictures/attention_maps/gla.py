"""Gated linear attention: products of queries and keys, channel by channel times what is not forgotten.

With gates of values every channel of a value has weights of its own; drawn is their mean.
"""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, silu, together, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder. The norm of each head is over what its weights give."""
    d, n, seen = mixer.width, len(x), visible(len(x), True)
    q, k, v = (heads(p, mixer.heads) for p in cut(x @ array(mixer.in_projection.kernel), [d // 2, d // 2, d]))
    until, of_values = np.zeros(q.shape), np.zeros(v.shape)  # [h, n, .]: the logarithm of all decays up to a token
    if mixer.gates in ("key", "both"):
        until = _until(mixer, mixer.decay_up, x @ array(mixer.decay_down.kernel))
    if mixer.gates in ("value", "both"):
        of_values = _until(mixer, mixer.value_decay_up, x @ array(mixer.value_decay_down.kernel))
    weights, out = np.zeros([mixer.heads, n, n]), np.zeros(v.shape)
    for i in range(n):
        kept, left = (np.exp(log[:, i : i + 1] - log[:, : i + 1]) for log in (until, of_values))  # [h, j, .]
        products = np.einsum("hs,hjs,hjs->hj", q[:, i], k[:, : i + 1], kept)
        weights[:, i, : i + 1] = products * left.mean(axis=-1)
        out[:, i] = np.einsum("hj,hje,hje->he", products, left, v[:, : i + 1])
    out = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + mixer.norm_epsilon) * array(mixer.norm_scale)
    left = silu(dense(mixer.gate_projection, x)) * together(out)
    return [Part("attention", weights, seen, left @ array(mixer.out_projection.kernel))]


def _until(mixer, up, low):
    """The logarithm of all gates up to a token: what `up` makes of `[n, gate_rank]` -> `[h, n, .]`."""
    return np.cumsum(heads(-np.logaddexp(0, -dense(up, low)) / mixer.temperature, mixer.heads), axis=1)
