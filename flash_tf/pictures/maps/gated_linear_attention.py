"""Gated linear attention: products of queries and keys, channel by channel times what is not forgotten."""

import numpy as np

from flash_tf.pictures.formulas import array, cut, dense, heads, silu, together, visible
from flash_tf.pictures.maps import Part


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder. The norm of each head is over what its weights give."""
    d, n, seen = mixer.width, len(x), visible(len(x), True)
    q, k, v = (heads(p, mixer.heads) for p in cut(x @ array(mixer.in_projection.kernel), [d // 2, d // 2, d]))
    until = np.zeros(q.shape)  # [h, n, s]: the logarithm of all decays up to a token
    if mixer.gates == "key":
        logits = dense(mixer.decay_up, x @ array(mixer.decay_down.kernel))
        until = np.cumsum(heads(-np.logaddexp(0, -logits) / mixer.temperature, mixer.heads), axis=1)
    weights = np.zeros([mixer.heads, n, n])
    for i in range(n):
        kept = np.exp(until[:, i : i + 1] - until[:, : i + 1])  # [h, j, s]
        weights[:, i, : i + 1] = np.einsum("hs,hjs,hjs->hj", q[:, i], k[:, : i + 1], kept)
    out = weights @ v
    out = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + 1e-5) * array(mixer.norm_scale)
    left = silu(dense(mixer.gate_projection, x)) * together(out)
    return [Part("attention", weights, seen, left @ array(mixer.out_projection.kernel))]
