"""Metrics of tasks by the field's definitions, in NumPy."""

from collections import Counter

import numpy as np

from flash_tf.data.spans import normalized


def confusion(labels: np.ndarray, predictions: np.ndarray, classes: int) -> np.ndarray:
    """Counts of each pair (label, prediction), `[classes, classes]`, from two integer arrays `[b]`."""
    return np.bincount(labels * classes + predictions, minlength=classes**2).reshape(classes, classes)


def accuracy(counts: np.ndarray) -> float:
    """The share of right predictions, from `confusion`."""
    return float(np.trace(counts) / max(counts.sum(), 1))


def f1(counts: np.ndarray) -> np.ndarray:
    """The harmonic mean of precision and recall of each class, `[classes]`, from `confusion`; 0 without a hit."""
    hits, both = np.diag(counts), counts.sum(axis=0) + counts.sum(axis=1)
    return np.divide(2.0 * hits, both, out=np.zeros(len(counts)), where=both > 0)


def matthews(counts: np.ndarray) -> float:
    """Matthews' correlation, from `confusion`, also for many classes; 0 if labels or predictions are all the same."""
    counts = counts.astype(np.float64)
    true, predicted, total = counts.sum(axis=1), counts.sum(axis=0), counts.sum()
    spread = (total**2 - predicted @ predicted) * (total**2 - true @ true)
    return float((np.trace(counts) * total - true @ predicted) / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Pearson's correlation of two arrays `[b]`; 0 if one of them is constant."""
    x, y = (a.astype(np.float64) - np.mean(a, dtype=np.float64) for a in (labels, predictions))
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread > 0 else 0.0


def spearman(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Spearman's correlation of two arrays `[b]`: Pearson's of their ranks, equal values sharing the mean rank."""
    return pearson(_ranks(labels), _ranks(predictions))


def _ranks(values):
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]


def exact_match(answer: str, references: list[str], quotes: str = "") -> float:
    """1.0 if an answer equals one of the references, both normalised by `flash_tf.data.spans.normalized`, else 0.0."""
    return max(float(normalized(answer, quotes) == normalized(one, quotes)) for one in references)


def answer_f1(answer: str, references: list[str], quotes: str = "") -> float:
    """The best harmonic mean of precision and recall of words against a reference, both normalised.

    As in the scripts of SQuAD and TriviaQA. Against an empty reference, it is 1.0 for an empty answer alone.
    """
    return max(_word_f1(normalized(answer, quotes).split(), normalized(one, quotes).split()) for one in references)


def _word_f1(answer, reference):
    if not answer or not reference:
        return float(answer == reference)
    same = sum((Counter(answer) & Counter(reference)).values())
    return 2.0 * same / (len(answer) + len(reference))
