"""Figures of the attention weights of a part of a mixer."""

import numpy as np

from flash_tf.pictures.attention_maps import Part

RATIOS = tuple(i / 10 for i in range(1, 11))  # lengths of neighbourhoods over the length of the text


def row_sums(part: Part) -> np.ndarray:
    """The sum of each query's weights, `[h, n]`."""
    return part.weights.sum(axis=-1)


def dead(part: Part) -> np.ndarray:
    """Queries `[h, n]` that see tokens and give all of them the weight zero."""
    return (part.weights == 0).all(axis=-1) & part.seen.any(axis=-1)


def distance(part: Part) -> float | None:
    """Mean distance |i - j| in tokens, weighted by the absolute weights; None if all weights are zero."""
    at, weights = np.arange(len(part.seen)), np.abs(part.weights).sum(axis=0)
    total = weights.sum()
    return float((weights * np.abs(at[:, None] - at)).sum() / total) if total > 0 else None


def accumulated(part: Part) -> list[float] | None:
    """The locally accumulated attention score for each of RATIOS; None if all weights are zero.

    It is the share of a query's absolute weights on the r tokens around it, as a mean over heads and over queries with
    weights, where r is the ratio times the length of the text. At an end of the text, the r tokens end there.

    Source: Qin et al., TransNormer, arXiv:2210.10340, section 3.2 and Figure 2.
    """
    weights, n = np.abs(part.weights), len(part.seen)
    totals, at = weights.sum(axis=-1), np.arange(n)
    if not totals.any():
        return None
    scores = []
    for ratio in RATIOS:
        r = max(1, round(ratio * n))
        start = np.clip(at - r // 2, 0, n - r)[:, None]
        near = (weights * ((start <= at) & (at < start + r))).sum(axis=-1)
        scores.append(float(np.mean(near[totals > 0] / totals[totals > 0])))
    return scores
