"""Linear attention: products of features, over their sum or not, over all tokens, in several heads."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, learned, rotated, together, visible

ELU = lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))  # noqa: E731
FEATURES = {
    "shifted_relu": lambda x: np.maximum(x, 0) + 1e-3,
    "relu": lambda x: np.maximum(x, 0),
    "elu_plus_one": lambda x: ELU(x) + 1,
    "elu": ELU,
    "softplus": lambda x: np.logaddexp(x, 0),
}


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder. With `normalizer: rms` the output's norm is over what all weights give."""
    q, k, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 3))
    q, k = (rotated(q), rotated(k)) if mixer.rotary else (q, k)
    seen, at = visible(len(x), mixer.causal), np.arange(len(x))
    q, k = _favor(mixer, q, k) if mixer.features == "favor" else (FEATURES[mixer.features](part) for part in (q, k))
    q, k = (learned(mixer.turn, q), learned(mixer.turn, k)) if mixer.lrpe else (q, k)
    weights = q @ np.swapaxes(k, -1, -2) * seen
    if mixer.cosine_length is not None:
        weights = weights * np.cos(np.pi / 2 * (at[:, None] - at) / mixer.cosine_length)
    if mixer.normalizer == "sum":
        weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-6)
    out = together(weights @ v)
    if mixer.normalizer == "rms":
        out = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + 1e-16)
    return [Part("attention", weights, seen, out @ array(mixer.out_projection.kernel))]


def _favor(mixer, q, k):
    """Random features `[h, n, r]`: a query's over its largest, times 1e6."""
    scale, directions = q.shape[-1] ** -0.25, array(mixer.favor.directions)
    q, k = q * scale, k * scale
    of_queries = q @ directions.T
    of_keys = k @ directions.T - (k**2).sum(axis=-1, keepdims=True) / 2
    return 1e6 * np.exp(of_queries - of_queries.max(axis=-1, keepdims=True)), np.exp(of_keys)
