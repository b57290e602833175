"""Mamba: the weight of an earlier token is its contribution to the state times the decay since then.

Every channel has weights of its own; drawn is their mean. Tokens are those behind the convolution.
"""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, silu, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder. A token's weight for itself has what passes by the state, D, in it."""
    n, s, e = len(x), mixer.state_size, mixer.inner
    x, z = cut(x @ array(mixer.in_projection.kernel), [e, e])
    taps = array(mixer.conv_weights)
    before = np.concatenate([np.zeros([len(taps) - 1, e]), x])
    x = silu(sum(tap * before[i : i + n] for i, tap in enumerate(taps)) + array(mixer.conv_bias))
    steps, b, c = cut(x @ array(mixer.state_projection.kernel), [mixer.rank, s, s])
    dt = np.logaddexp(0, steps @ array(mixer.step_projection.kernel) + array(mixer.step_bias))
    a, d = -np.exp(array(mixer.log_decay_rate).reshape(e, s)), array(mixer.skip)
    until, out, weights = np.cumsum(dt, axis=0), np.zeros([n, e]), np.zeros([1, n, n])
    for i in range(n):
        left = np.exp((until[i] - until[: i + 1])[..., None] * a)  # [j, e, s]
        of_channels = np.einsum("s,js,jes,je->je", c[i], b[: i + 1], left, dt[: i + 1])
        of_channels[i] += d
        out[i] = np.sum(of_channels * x[: i + 1], axis=0)
        weights[0, i, : i + 1] = of_channels.mean(axis=-1)
    return [Part("attention", weights, visible(n, True), (out * silu(z)) @ array(mixer.out_projection.kernel))]
