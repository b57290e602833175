"""Sets of time spans. A set is a pair of int64 arrays: the starts and the ends of its spans."""

import numpy as np

Spans = tuple[np.ndarray, np.ndarray]


def merged(starts, ends) -> Spans:
    """The same times as ordered spans that do not touch."""
    starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], ends[last]


def union(*several: Spans) -> Spans:
    """The times that are in any of the sets."""
    return merged(*(np.concatenate([np.asarray(one[i], np.int64) for one in several]) for i in range(2)))


def length(spans: Spans, start: int, end: int) -> int:
    """The time between `start` and `end` that the merged spans cover."""
    return int(np.clip(np.minimum(spans[1], end) - np.maximum(spans[0], start), 0, None).sum())


def own(starts, ends) -> np.ndarray:
    """Each span's time without the spans inside it. The spans of one thread nest and never cross."""
    starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    left, open_spans = ends - starts, []
    for i in np.lexsort((-ends, starts)):
        while open_spans and ends[open_spans[-1]] <= starts[i]:
            open_spans.pop()
        if open_spans:
            left[open_spans[-1]] -= ends[i] - starts[i]
        open_spans.append(i)
    return np.maximum(left, 0)  # on a GPU stream a span may begin a moment before the last one ends
