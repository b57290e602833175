"""What is drawn, against the definition of each cut, in float64 NumPy."""

import numpy as np
import pytest
from keras import ops

from flash_tf.generation import GREEDY, BeamSearch, Sampler
from tests.backends import to_numpy

V, DRAWS = 23, 20_001
LOGITS = np.random.default_rng(0).normal(size=(1, V)).astype("float32") * 2


def probabilities(temperature=1.0, top_k=None, top_p=None):
    """The distribution by definition: the likeliest tokens of the tempered one, by number, then by their mass."""
    p = np.exp(LOGITS[0].astype(float) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[:top_k]
    if top_p is not None:
        mass = np.cumsum(p[kept] / p[kept].sum())
        kept = kept[: np.searchsorted(mass, top_p) + 1]
    cut = np.zeros(V)
    cut[kept] = p[kept]
    return cut / cut.sum()


def chosen(sampler, logits=LOGITS, draws=None):
    """The token for each of evenly spaced draws, or for each of `draws`."""
    draws = (np.arange(DRAWS) + 0.5) / DRAWS if draws is None else np.asarray(draws)
    logits = np.broadcast_to(logits, (len(draws), logits.shape[-1]))
    return to_numpy(sampler(ops.convert_to_tensor(logits), ops.convert_to_tensor(draws.astype("float32"))))


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10 * V},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 1.0},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_even_draws_give_each_token_its_share(options):
    counts = np.bincount(chosen(Sampler(**options)), minlength=V)
    # Each token has an interval of draws; the ends of those that meet may fall a draw to either side.
    assert np.abs(counts - DRAWS * probabilities(**options)).max() <= 2


def test_greedy_is_the_likeliest_whatever_the_draw():
    assert set(chosen(GREEDY)) == {LOGITS.argmax()}


def test_the_least_and_the_largest_draw_choose_tokens_that_can_be():
    logits = np.full((1, V), -np.inf, "float32")
    logits[0, [3, 7]] = 0
    for sampler in (Sampler(), Sampler(top_k=5), Sampler(top_p=0.9)):
        found = chosen(sampler, logits, [0.0, np.nextafter(np.float32(1), np.float32(0))])
        assert set(found) == {3, 7}


def test_numbers_of_numpy_are_python_s():
    logits = np.log([[0.1, 0.6, 0.3]]).astype("float32")
    assert chosen(Sampler(top_k=np.int64(2)), logits, [0.7]).tolist() == [2]
    assert Sampler(top_k=np.int64(2)) == Sampler(top_k=2) and BeamSearch(np.int32(2)) == BeamSearch(2)
    with pytest.raises(ValueError, match="an integer of 1 or more, got 2.0"):
        Sampler(top_k=2.0)
    with pytest.raises(ValueError, match="an integer of 1 or more, got 2.0"):
        BeamSearch(2.0)


def test_a_draw_is_a_rows_own():
    logits = np.zeros((1, 4), "float32")
    assert chosen(Sampler(), logits, [0.1, 0.3, 0.6, 0.9]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} must be .*got {value}"):
        Sampler(**options)


def test_a_temperature_near_zero_draws_the_likeliest_token():
    for temperature in (1e-39, 1e-7, 1e-5):
        assert (chosen(Sampler(temperature=temperature, top_p=0.9)) == LOGITS.argmax()).all()
