"""FLASH: squared ReLU among the tokens of a chunk, and linear attention to the chunks before, or to all tokens."""

import numpy as np

from flash_tf.pictures.formulas import GatedUnit, rotated, squared_relu, visible
from flash_tf.pictures.maps import Part


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The sum inside the chunk, and the sum across chunks over the tokens that it takes; see the folder."""
    unit, n = GatedUnit(mixer, x), len(x)
    q_quad, k_quad, q_lin, k_lin = (rotated(unit.head(name)) for name in ("quad_q", "quad_k", "lin_q", "lin_k"))
    chunk = np.arange(n) // mixer.chunk_size
    inside = (chunk[:, None] == chunk[None, :]) & visible(n, mixer.causal)
    across = chunk[None, :] < chunk[:, None] if mixer.causal else np.ones((n, n), bool)

    local = squared_relu(q_quad[None], k_quad[None], unit.bias, mixer.chunk_size, mixer.scale) * inside
    tokens = np.maximum(across.sum(axis=1, keepdims=True), 1)
    far = (q_lin @ k_lin.T)[None] / tokens * across
    return [
        Part("local", local, inside, unit.leave(local[0] @ unit.v)),
        Part("global", far, across, unit.leave(far[0] @ unit.v)),
    ]
