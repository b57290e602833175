"""Reformer: softmax among neighbours in the text sorted by hash, over all rounds."""

import numpy as np

from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, cut, dense, heads, together


def parts(mixer, x: np.ndarray) -> list[Part]:
    """The one sum; see the folder."""
    q, v = (heads(part, mixer.heads) for part in cut(dense(mixer.in_projection, x), [mixer.width] * 2))
    k = q / np.sqrt((q**2).sum(axis=-1, keepdims=True) + 1e-6 * q.shape[-1])
    size = (q.shape[-1], mixer.rounds, mixer.buckets // 2)
    weights, seen = np.zeros([mixer.heads, len(x), len(x)]), np.zeros([len(x), len(x)], bool)
    for rotation in np.moveaxis(np.random.default_rng(mixer.seed).normal(size=size), 1, 0):
        turned = q @ rotation
        bucket = np.concatenate([turned, -turned], axis=-1).argmax(axis=-1)
        chunk = np.argsort(np.argsort(bucket, axis=-1, kind="stable"), axis=-1) // mixer.chunk_size  # [h, n]
        apart = chunk[:, :, None] - chunk[:, None]
        beside = (apart == 0) | (apart == 1)
        beside &= ~np.eye(len(x), dtype=bool)
        weights += np.exp(q @ np.swapaxes(k, -1, -2)) * beside
        seen |= beside.any(axis=0)
    alone = np.eye(len(x)) * (weights.sum(axis=-1, keepdims=True) == 0)  # in all rounds: it sees itself
    weights, seen = weights + alone, seen | alone.any(axis=0)
    weights /= weights.sum(axis=-1, keepdims=True)  # all rounds together: each counts by its sum
    return [Part("attention", weights, seen, together(weights @ v) @ array(mixer.out_projection.kernel))]
