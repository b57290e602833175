"""Pathfinder."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from flash_tf.data import pixels
from flash_tf.data.generated import Draws, Generated
from flash_tf.data.sources import SOURCES

UNIT = 32.0  # the side of a picture, in which all lengths are given
STEP, DASH, THICK, MARKER = 2.6, 1.6, 0.8, 1.4  # from dash to dash, a dash, its width, the radius of a marker
APART, MARGIN = 2.3, 2.0  # least distances of the middle of a dash: from other dashes, and from the edge
BEND = 0.6  # the largest turn from dash to dash, in radians
TRIES, BACK, PATIENCE = 6, 4, 8  # tries of a dash; dashes taken back after them; dashes tried for each of a path


@SOURCES.register("pathfinder")
class Pathfinder(Generated):
    """An image of dashed paths and two markers: are the markers the ends of one path?

    There are two long paths and some short ones, in the way of Linsley et al., arXiv:1805.08315, and of the Long-Range
    Arena (Tay et al., arXiv:2011.04006). If the answer is no, the markers are ends of the two long paths. Pathfinder-X
    is `size: 128`: the same picture in 16 times as many pixels. The pictures are drawn here, by other rules than the
    arena's; `pathfinder_files` reads its own.

    An example has `text`, the image, which is read as words of pixels, and `label`, 1 for yes. A classifier reads it.

    Args:
      size: Pixels of a side, 16 or more.
      contour_length: Dashes of a long path; the arena has 6, 9 and 14.
      distractors: Short paths, each of a third of the dashes.
      train: Examples of the training split.
      validation: Examples of the validation split.
      seed: See `Generated`.
    """

    words = pixels.WORDS

    def __init__(
        self,
        size: int = 32,
        contour_length: int = 14,
        distractors: int = 4,
        train: int = 160_000,
        validation: int = 20_000,
        seed: int = 0,
    ):
        super().__init__(train, validation, seed)
        if size < 16 or not 2 <= contour_length <= 14 or not 0 <= distractors <= 8:
            raise ValueError(
                "pathfinder needs a size of 16 or more, a contour_length of 2 to 14 and 0 to 8 distractors, "
                f"got {size}, {contour_length} and {distractors}"
            )
        self.size, self.contour_length, self.distractors = size, contour_length, distractors

    def records(self, draws: Draws, count: int, split: str) -> Iterator[dict[str, Any]]:
        for _ in range(count):
            paths = self._paths(draws)
            label, one, end, other_end = draws.integers(0, 2, 4).tolist()
            first, second = paths[one], paths[one if label else 1 - one]
            ends = [first[-end], second[end - 1 if label else -other_end]]
            yield {"text": _image(paths, np.array(ends), self.size), "label": label}

    def _paths(self, draws):
        """The long paths, then the short ones, each `[dashes, (x, y, heading)]`."""
        lengths = [self.contour_length] * 2 + [max(2, self.contour_length // 3)] * self.distractors
        while True:
            paths = []
            for length in lengths:
                path = _path(draws, length, [dash for path in paths for dash in path])
                if path is None:
                    break
                paths.append(path)
            else:
                return [np.array(path) for path in paths]


def _path(draws, length, others):
    """A path that keeps away from other dashes, as a list of dashes; None if none was found."""
    path = []
    for _ in range(PATIENCE * length):
        dash = _next(draws, path[-1], others + path[:-1]) if path else _start(draws, others)
        if dash is None:
            del path[-BACK:]
            continue
        path.append(dash)
        if len(path) == length:
            return path
    return None


def _start(draws, others):
    """A dash anywhere; None if it was too near to others."""
    x, y, heading = (draws.uniform(3) * [UNIT, UNIT, 2 * np.pi]).tolist()
    return (x, y, heading) if _free(x, y, others) else None


def _next(draws, dash, others):
    """A dash after another one; None if none was found."""
    x, y, heading = dash
    for turn in ((2 * draws.uniform(TRIES) - 1) * BEND).tolist():
        towards = heading + turn / 2
        there = x + STEP * math.cos(towards), y + STEP * math.sin(towards)
        if _free(*there, others):
            return *there, heading + turn
    return None


def _free(x, y, others):
    inside = MARGIN <= x <= UNIT - MARGIN and MARGIN <= y <= UNIT - MARGIN
    return inside and all((x - a) ** 2 + (y - b) ** 2 >= APART**2 for a, b, _ in others)


def _image(paths, ends, size):
    """Dashes and round markers, uint8 `[size, size]`."""
    dashes = np.concatenate(paths)
    at = (np.arange(size) + 0.5) * UNIT / size
    x, y = at[None, :, None] - dashes[:, 0], at[:, None, None] - dashes[:, 1]  # [1, n, dashes], [n, 1, dashes]
    along = x * np.cos(dashes[:, 2]) + y * np.sin(dashes[:, 2])
    across = y * np.cos(dashes[:, 2]) - x * np.sin(dashes[:, 2])
    beyond = np.maximum(np.abs(along) - DASH / 2, 0)
    lines = THICK / 2 - np.hypot(beyond, across).min(axis=-1)
    discs = MARKER - np.hypot(at[None, :, None] - ends[:, 0], at[:, None, None] - ends[:, 1]).min(axis=-1)
    inside = np.maximum(lines, discs) * size / UNIT  # pixels from the outline
    return np.round(np.clip(inside + 0.5, 0, 1) * 255).astype("uint8")
