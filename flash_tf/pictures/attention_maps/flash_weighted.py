"""FLASH with chunks weighed by scores: squared ReLU inside a chunk, and weighted linear attention across chunks."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import GatedUnit, rotated, squared_relu, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The sum inside the chunk, and that across chunks, each token under the weight of its chunk; see the folder."""
    unit, n, c = GatedUnit(mixer, x), len(x), mixer.chunk_size
    heads = {name: rotated(unit.head(name))[None] for name in mixer.head_names}
    chunk = np.arange(n) // c
    behind = chunk[:, None] - chunk
    inside = (behind == 0) & visible(n, mixer.causal)
    across = behind > 0 if mixer.causal else np.ones((n, n), bool)

    near = squared_relu(heads["quad_q"], heads["quad_k"], unit.bias, c, mixer.scale)
    asks = _mean(behind == (1 if mixer.causal else 0), heads["sum_q"])
    scores = asks @ np.swapaxes(_mean(behind == 0, heads["sum_k"]), -1, -2) / np.sqrt(mixer.key_dim)
    highest = np.max(scores, axis=-1, keepdims=True, where=across, initial=-1e30)
    shares = np.exp(np.minimum(scores - highest, 0)) * across
    shares = shares / np.maximum(shares.sum(axis=-1, keepdims=True), 1)  # 0 where no chunk is seen
    far = heads["lin_q"] @ np.swapaxes(heads["lin_k"], -1, -2) * shares
    weights = {"local": (near * inside, inside), "global": (far, across)}
    return [Part(name, part, seen, unit.leave(part[0] @ unit.v)) for name, (part, seen) in weights.items()]


def _mean(of, x):
    """The mean of x `[1, n, s]` over the tokens that each has, `[n, n]`; 0 where it has none."""
    return of @ x / np.maximum(of.sum(axis=-1, keepdims=True), 1)
