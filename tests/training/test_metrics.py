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
