"""Models whose blocks differ: a list of mixers shares them in equal parts."""

import numpy as np
import pytest

from flash_tf.models.causal_lm import CausalLM
from flash_tf.models.masked_lm import MaskedLM
from flash_tf.registry import mixer_name
from tests.backends import to_numpy
from tests.numerics import FLOAT32, relative_error

V, N = 40, 37
CHUNKED = {"type": "flash", "chunk_size": 8, "key_dim": 16}
QUADRATIC = {"type": "gau", "key_dim": 16}
SIZES = {"vocabulary_size": V, "width": 32, "position_embedding": None}


def ids(rows=2, n=N):
    return np.random.default_rng(0).integers(0, V, (rows, n)).astype("int32")


def made(mixer, depth=4, **options):
    model = CausalLM(depth=depth, mixer=mixer, **{**SIZES, **options})
    model.build()
    rng = np.random.default_rng(6)
    for weight in model.weights:
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * rng.normal(size=weight.shape))
    return model


@pytest.mark.parametrize(
    ("mixer", "want"),
    [
        ([CHUNKED, QUADRATIC], "CCQQ"),
        ([CHUNKED, QUADRATIC] * 2, "CQCQ"),
        ([QUADRATIC, CHUNKED, CHUNKED, CHUNKED], "QCCC"),
        ([QUADRATIC], "QQQQ"),
        (QUADRATIC, "QQQQ"),
    ],
)
def test_mixers_share_the_blocks_in_their_order(mixer, want):
    letters = {"MixedChunkAttention": "C", "GatedAttentionUnit": "Q"}
    assert "".join(letters[type(layer).__name__] for layer in made(mixer).mixers) == want


def test_a_model_is_called_by_all_its_mixers():
    assert mixer_name([CHUNKED, QUADRATIC, CHUNKED]) == "flash, gau"
    assert mixer_name(CHUNKED) == "flash"


@pytest.mark.parametrize(("mixer", "said"), [([CHUNKED] * 3, "got 3 for depth 4"), ([], "got 0 for depth 4")])
def test_mixers_that_do_not_divide_the_blocks_are_refused(mixer, said):
    with pytest.raises(ValueError, match=said):
        made(mixer)


def test_mixers_of_a_list_survive_a_round_trip():
    model = made([CHUNKED, QUADRATIC], depth=2)
    again = CausalLM.from_config(model.get_config())
    again.build()
    again.set_weights(model.get_weights())
    assert np.array_equal(to_numpy(again(ids())), to_numpy(model(ids())))


@pytest.mark.parametrize("mixer", [[CHUNKED, QUADRATIC], [CHUNKED, QUADRATIC] * 2])
def test_a_model_of_two_mixers_streams_and_has_a_capacity_if_one_grows(mixer):
    model = made(mixer, depth=len(mixer))
    whole, state = to_numpy(model(ids())), model.initial_state(2, N)
    assert model.grows and model.obstacle is None
    for start, stop in [(0, 11), *((i, i + 1) for i in range(11, 20)), (20, N)]:
        logits, state = model.extend(ids()[:, start:stop], state)
        assert relative_error(to_numpy(logits), whole[:, start:stop]) < FLOAT32
    with pytest.raises(ValueError, match="capacity"):
        model.initial_state(2)


def test_a_model_of_two_mixers_generates_what_one_pass_over_its_text_says():
    model = made([CHUNKED, QUADRATIC], depth=2)
    prompt = ids(1)[0].tolist()
    (found,) = model.generate([prompt], 12)
    logits = to_numpy(model(np.array([prompt + found], "int32")))[0]
    assert found == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_documents_start_where_every_mixer_lets_them():
    coarse = {**CHUNKED, "chunk_size": 12}
    assert made([CHUNKED, coarse]).align == 24


def test_a_model_cannot_go_on_from_a_state_if_one_mixer_cannot():
    assert "length" in made([CHUNKED, {**QUADRATIC, "divisor": "length"}]).obstacle
    assert MaskedLM(depth=2, mixer=CHUNKED, **SIZES).obstacle is not None


@pytest.mark.parametrize("norm", ["scale_norm", "layer_norm", "rms_norm", "simple_rms_norm"])
def test_every_norm_streams(norm):
    model = made(CHUNKED, depth=1, norm=norm)
    whole, state = to_numpy(model(ids())), model.initial_state(2)
    for start, stop in [(0, 11), (11, 12), (12, N)]:
        logits, state = model.extend(ids()[:, start:stop], state)
        assert relative_error(to_numpy(logits), whole[:, start:stop]) < FLOAT32
