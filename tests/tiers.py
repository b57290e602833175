"""What the default tier of tests leaves to the full one, beside tests that carry the mark `full` itself."""

import keras
import pytest

ON_JAX = keras.backend.backend() == "jax"


def thinned(values, *kept):
    """Parameters of a test or a fixture: all but those that are `kept` are `full`."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.full) for value in values]


def thinned_on_jax(values, *kept):
    """The same, on JAX alone."""
    return thinned(values, *kept) if ON_JAX else values


def of_kinds(cases, *kinds):
    """Cases with ids `KIND` or `KIND-OPTIONS`: all others than `kinds` are `full`."""
    full = lambda case: [] if case.id.partition("-")[0] in kinds else [pytest.mark.full]  # noqa: E731
    return [pytest.param(*case.values, id=case.id, marks=[*case.marks, *full(case)]) for case in cases]


def full_on_jax(test):
    """Marks a test as `full` on JAX alone, for which it says little more than it says on TensorFlow."""
    return pytest.mark.full(test) if ON_JAX else test
