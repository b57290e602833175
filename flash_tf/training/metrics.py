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
    """1.0 if an answer equals one of the references, both normalized by `flash_tf.data.spans.normalized`, else 0.0."""
    return max(float(normalized(answer, quotes) == normalized(one, quotes)) for one in references)


def answer_f1(answer: str, references: list[str], quotes: str = "") -> float:
    """The best harmonic mean of precision and recall of words against a reference, both normalized.

    As in the scripts of SQuAD and TriviaQA. Against an empty reference, it is 1.0 for an empty answer alone.
    """
    return max(_word_f1(normalized(answer, quotes).split(), normalized(one, quotes).split()) for one in references)


def answer_metrics(answer: str, references: list[str], quotes: str = "") -> tuple[float, float]:
    """`exact_match` and `answer_f1`. Without references, no answer is right."""
    return exact_match(answer, references or [""], quotes), answer_f1(answer, references or [""], quotes)


def of_questions(
    scores: np.ndarray, given: np.ndarray, spans: np.ndarray, none: np.ndarray, has_answer: np.ndarray
) -> dict[str, float]:
    """The metrics of questions that may have no answer, by the names of SQuAD 2.0's script in words.

    Args:
      scores: `[q]`, how far the logits of the best span are above the logits of no answer.
      given: Bool `[q]`, whether the best span is the answer.
      spans: `[q, 2]`, `answer_metrics` of the best span.
      none: `[q, 2]`, the same of no answer.
      has_answer: Bool `[q]`, whether the question has an answer.

    Returns:
      `exact_match` and `f1` of the answers; `has_answer_*` of the best spans of questions that have an answer, which no
      threshold changes; the share without an answer; `best_*` over all thresholds of the score, each with its own.
    """
    exact_match, f1 = np.where(given[:, None], spans, none).mean(axis=0)
    has_exact_match, has_f1 = spans[has_answer].sum(axis=0) / max(has_answer.sum(), 1)
    best = [best_threshold(scores, *both) for both in zip(spans.T, none.T, strict=True)]
    return {
        "exact_match": float(exact_match),
        "f1": float(f1),
        "has_answer_exact_match": float(has_exact_match),
        "has_answer_f1": float(has_f1),
        "no_answer_share": float(1 - has_answer.mean()),
        "best_exact_match": best[0][0],
        "best_exact_match_threshold": best[0][1],
        "best_f1": best[1][0],
        "best_f1_threshold": best[1][1],
    }


def best_threshold(scores: np.ndarray, spans: np.ndarray, none: np.ndarray) -> tuple[float, float]:
    """The best mean metric over all thresholds of the score, and the threshold: SQuAD 2.0's `best_f1`.

    A question is answered if its score is the threshold or above. As in SQuAD's script, questions are answered one
    after the other by falling score; among equal means the fewest are. The threshold lies halfway to the next score,
    or 1 beyond the last.

    Args:
      scores: `[q]`, how far the logits of the best span are above the logits of no answer.
      spans: `[q]`, the metric of each question if its best span is the answer.
      none: `[q]`, the metric of each question without an answer.

    Returns:
      The mean metric, and the threshold.
    """
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    sums = none.sum() + np.concatenate([[0.0], np.cumsum((spans - none)[order])])  # [q + 1], of the first i answered
    between = np.concatenate([scores[:1] + 1, (scores[:-1] + scores[1:]) / 2, scores[-1:] - 1])
    apart = np.concatenate([[True], scores[:-1] > scores[1:], [True]])  # equal scores are answered together
    best = int(np.argmax(np.where(apart, sums, -np.inf)))
    return float(sums[best] / len(scores)), float(between[best])


def _word_f1(answer, reference):
    if not answer or not reference:
        return float(answer == reference)
    same = sum((Counter(answer) & Counter(reference)).values())
    return 2.0 * same / (len(answer) + len(reference))
