"""FLASH: squared ReLU among the tokens of a chunk, and linear attention to the chunks before, or to all tokens."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import GatedUnit, rotated, softmax, squared_relu, visible


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The sum inside the chunk, and the sum across chunks over the tokens that it takes; see the folder.

    The first tokens that take a softmax over the text in place of both have it in the part of the first sum.
    """
    unit, n, c, found = GatedUnit(mixer, x), len(x), mixer.chunk_size, []
    heads = {name: unit.head(name)[None] for name in mixer.head_names}
    heads |= {name: rotated(heads[name], turning=mixer.rotary_dim) for name in mixer.rotated_head_names}
    every, at = np.ones((n, n), bool), np.arange(n)
    behind = at[:, None] // c - at // c  # chunks
    first = {"none": at < 0, "cls": at == 0, "chunks": at % c == 0}[mixer.first_to_all][:, None]

    def add(name, weights, seen):
        found.append(Part(name, weights * seen, seen, unit.leave((weights * seen)[0] @ unit.v)))

    if mixer.parts != "global":
        chunks = 2 if mixer.overlapping else 1
        inside = (0 <= behind) & (behind < chunks) & visible(n, mixer.causal)
        quad = heads["quad_q"], heads["quad_k"]
        weights = squared_relu(*quad, unit.bias, chunks * c, mixer.scale)
        add("local", np.where(first, softmax(*quad, every), weights), inside | first)
    if mixer.parts != "local":
        across = (behind > 0 if mixer.causal else every) & ~first
        tokens = c if mixer.chunk_divisor else np.maximum(across.sum(axis=1, keepdims=True), 1)
        add("global", heads["lin_q"] @ np.swapaxes(heads["lin_k"], -1, -2) / tokens, across)
    return found
