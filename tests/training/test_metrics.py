"""Metrics of tasks: equal to scikit-learn's and SciPy's on random cases, and defined where those warn."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from flash_tf.data.spans import QUOTES
from flash_tf.training import metrics


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_of_classes_are_those_of_scikit_learn(classes):
    rng = np.random.default_rng(classes)
    for size in (5, 60, 1_000):
        labels, predictions = rng.integers(0, classes, (2, size))
        counts = metrics.confusion(labels, predictions, classes)
        average = {"average": None, "labels": range(classes), "zero_division": 0}
        assert metrics.accuracy(counts) == pytest.approx(sklearn.metrics.accuracy_score(labels, predictions))
        assert metrics.f1(counts) == pytest.approx(sklearn.metrics.f1_score(labels, predictions, **average))
        assert metrics.matthews(counts) == pytest.approx(sklearn.metrics.matthews_corrcoef(labels, predictions))


def test_correlations_are_those_of_scipy_also_with_equal_values():
    rng = np.random.default_rng(0)
    for size in (3, 50, 2_000):
        x = rng.integers(0, 6, size) + 0.0
        y = np.round(x + rng.normal(size=size), 1).astype("float32")
        assert metrics.pearson(x, y) == pytest.approx(scipy.stats.pearsonr(x, y).statistic)
        assert metrics.spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic)


def test_a_model_that_says_one_thing_alone_has_no_correlation():
    labels, constant = np.array([0, 1, 1, 0]), np.array([1, 1, 1, 1])
    counts = metrics.confusion(labels, constant, 2)
    assert (metrics.matthews(counts), metrics.f1(counts).tolist()) == (0.0, [0.0, pytest.approx(2 / 3)])
    assert (metrics.pearson(labels, constant), metrics.spearman(labels, constant)) == (0.0, 0.0)


# By hand from the rules of the published scripts: lower case, no punctuation, no articles, a word counts once.
@pytest.mark.parametrize(
    ("answer", "references", "quotes", "exact", "f1"),
    [
        ("The Panthers!", ["panthers"], "", 1, 1),
        ("Denver Broncos", ["the Broncos of Denver", "Carolina"], "", 0, 2 * 2 / (2 + 3)),
        ("a b b", ["b b b"], "", 0, 2 * 2 / (2 + 3)),
        ("", [""], "", 1, 1),
        ("", ["x"], "", 0, 0),
        ("the", ["x"], "", 0, 0),
        ("well-known", ["wellknown"], "", 1, 1),
        ("well-known", ["well known"], QUOTES, 1, 1),
        ("well-known", ["wellknown"], QUOTES, 0, 0),
        ("rock_n_roll", ["Rock ‘n’ Roll"], QUOTES, 1, 1),
    ],
)
def test_answers_are_compared_by_the_rules_of_squad_and_triviaqa(answer, references, quotes, exact, f1):
    assert metrics.exact_match(answer, references, quotes) == exact
    assert metrics.answer_f1(answer, references, quotes) == pytest.approx(f1)


# By hand: four questions with an answer, two without; the score, and exact match and F1 of the best span.
CASES = [
    (3.0, 1.0, 1.0, 1),
    (2.0, 0.0, 0.5, 1),
    (1.0, 0.0, 0.0, 0),
    (0.0, 1.0, 1.0, 1),
    (-1.0, 0.0, 0.0, 0),
    (-2.0, 0.0, 0.2, 1),
]


def arrays(cases, threshold=0.0):
    score, exact, f1, has = (np.array(column, "float64") for column in zip(*cases, strict=True))
    none = np.stack([1 - has] * 2, axis=1)
    return {
        "scores": score,
        "given": score >= threshold,
        "spans": np.stack([exact, f1], axis=1),
        "none": none,
        "has_answer": has > 0,
    }


def test_the_metrics_of_questions_are_those_counted_by_hand():
    found = metrics.of_questions(**arrays(CASES))
    want = {"exact_match": 3 / 6, "f1": 3.5 / 6, "has_answer_exact_match": 2 / 4, "has_answer_f1": 2.7 / 4}
    want |= {"no_answer_share": 2 / 6, "best_exact_match": 3 / 6, "best_f1": 3.5 / 6}
    assert found == pytest.approx(want | {"best_exact_match_threshold": 2.5, "best_f1_threshold": 1.5})


def by_the_published_rule(cases, metric):
    """Answers one question after the other, as SQuAD 2.0's script does, and keeps the best.

    Returns the best mean, and the odds of no answer up to which a question is answered.
    """
    total = best = sum(not case[3] for case in cases)
    odds_of_best = None
    for score, *values, has in sorted(cases, key=lambda case: -case[0]):
        total += values[metric] if has else -1
        if total > best:
            best, odds_of_best = total, -score
    return best / len(cases), odds_of_best


@pytest.mark.parametrize("seed", range(20))
def test_the_best_threshold_is_that_of_squad_s_script_and_of_all_thresholds(seed):
    rng = np.random.default_rng(seed)
    size, share = rng.integers(1, 40), rng.random()
    scores = rng.permutation(size) - size / 2 + rng.normal() if seed % 2 else rng.integers(-3, 4, size) + 0.0
    f1 = np.round(rng.random(size), 3)
    cases = [(x, float(y > 0.6), y, int(rng.random() < share)) for x, y in zip(scores, f1, strict=True)]
    cases = [case if case[3] else (case[0], 0.0, 0.0, 0) for case in cases]
    found = metrics.of_questions(**arrays(cases))
    every = [metrics.of_questions(**arrays(cases, t)) for t in np.concatenate([scores, [scores.max() + 1]])]
    for i, name in enumerate(("exact_match", "f1")):
        best, threshold = found[f"best_{name}"], found[f"best_{name}_threshold"]
        assert best == pytest.approx(max(one[name] for one in every))
        assert metrics.of_questions(**arrays(cases, threshold))[name] == pytest.approx(best)
        if seed % 2:  # the script's rule is for scores that differ
            want, odds = by_the_published_rule(cases, i)
            assert best == pytest.approx(want)
            answered = np.array([]) if odds is None else scores[scores >= -odds]
            np.testing.assert_array_equal(scores[scores >= threshold], answered)
