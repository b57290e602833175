"""FLASH with weighted chunks, beside FLASH: where both are the same, where documents leave gaps, and its stream."""

import numpy as np
import pytest
from keras import ops

from flash_tf.layers import MixedChunkAttention, WeightedChunks
from kernels_xla.flash.attention import mixed_chunk_attention
from kernels_xla.flash.weighted import SPEC, weighted_mixed_chunk_attention
from tests.backends import call, tensors, to_numpy
from tests.numerics import FLOAT32, SIZES, inputs, masks, relative_error
from tests.oracles import ORACLES

ARRAYS, C, N = inputs(SPEC), 4, SIZES["n"]
LAYER, WIDTH = {"chunk_size": C, "key_dim": 8, "causal": True}, 16
each_order = pytest.mark.parametrize("causal", [False, True])


def both(causal, arrays, **masked):
    """Weighted chunks, and FLASH of the same heads."""
    given, masked = tensors(arrays, "float32"), tensors(masked, "float32")
    plain = {name: x for name, x in given.items() if name not in ("sum_q", "sum_k")}
    options = {"chunk_size": C, "causal": causal, **masked}
    return to_numpy(weighted_mixed_chunk_attention(**given, **options)), to_numpy(
        mixed_chunk_attention(**plain, **options)
    )


@each_order
@pytest.mark.parametrize("layout", ["whole", "padded", "packed"])
@pytest.mark.parametrize("silent", ["sum_q", "sum_k"])
def test_with_scores_of_zero_it_is_mixed_chunk_attention(causal, layout, silent):
    zeros = {silent: np.zeros_like(ARRAYS[silent])}
    got, want = both(causal, {**ARRAYS, **zeros}, **masks(layout))
    assert relative_error(got, want) < FLOAT32
    got, want = both(causal, ARRAYS, **masks(layout))
    assert relative_error(got, want) > FLOAT32


def test_two_chunks_of_a_causal_text_have_nothing_to_weigh_and_a_third_has():
    got, want = both(True, ARRAYS)
    assert relative_error(got[:, : 2 * C], want[:, : 2 * C]) < FLOAT32
    assert all(relative_error(got[:, i], want[:, i]) > FLOAT32 for i in range(2 * C, N))


@each_order
def test_one_vector_added_to_all_keys_of_chunks_changes_nothing(causal):
    more = {"sum_k": ARRAYS["sum_k"] + np.arange(SIZES["s"]) / 4}
    options = {"chunk_size": C, "causal": causal}
    got, want = (call(SPEC.fast, options, arrays) for arrays in ({**ARRAYS, **more}, ARRAYS))
    assert relative_error(got, want) < FLOAT32


@each_order
@pytest.mark.parametrize("documents", [[37], [9, 28], [18, 2, 1, 16]])
def test_chunks_of_padding_alone_neither_weigh_nor_ask(causal, documents):
    real = np.ones([SIZES["b"], N], bool)
    real[0, 5 * C : 6 * C] = real[1, 6 * C - 1 : 8 * C] = False
    ids = np.repeat(np.arange(len(documents)) + 3, documents)[None].repeat(SIZES["b"], axis=0)
    case, masked = {"chunk_size": C, "causal": causal}, {"padding_mask": real, "segment_ids": ids}
    got = call(SPEC.fast, case, ARRAYS, masked)
    assert relative_error(got, ORACLES["flash_weighted"](**ARRAYS, **masked, **case)) < FLOAT32


def test_scores_of_a_thousand_choose_one_chunk_and_stay_finite():
    arrays = {**ARRAYS, **{name: 100 * ARRAYS[name] for name in ("sum_q", "sum_k")}}
    for causal in (False, True):
        case = {"chunk_size": C, "causal": causal}
        want = call(SPEC.reference, case, arrays, dtype="float64")
        assert relative_error(call(SPEC.fast, case, arrays), want) < FLOAT32


def built(**options):
    layer = WeightedChunks(**{**LAYER, **options})
    layer.build((1, None, WIDTH))
    rng = np.random.default_rng(6)
    for weight in layer.weights:
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * rng.normal(size=weight.shape))
    return layer


def test_its_weights_are_those_of_flash_and_two_heads_more():
    layer, flash = built(), MixedChunkAttention(**LAYER)
    flash.build((1, None, WIDTH))
    more = {f"{kind}_{head}" for kind in ("gamma", "beta") for head in ("sum_q", "sum_k")}
    assert {w.name for w in layer.offset_scale.weights} - {w.name for w in flash.offset_scale.weights} == more
    assert layer.count_params() - flash.count_params() == 4 * layer.key_dim


def test_the_state_keeps_a_matrix_of_every_chunk_that_a_text_may_have():
    layer = built()
    state = layer.initial_state(3, 5 * C + 1)
    assert tuple(state["chunks"].shape) == (3, 6, 8, 2 * WIDTH) and tuple(state["keys"].shape) == (3, 6, 8)
    more = layer.state_bytes(9 * C, 2) - layer.state_bytes(8 * C, 2)
    assert more == 2 * 8 * 2 * WIDTH + 4 * 8


def test_rows_close_their_chunks_at_any_pace_and_closing_twice_is_closing_once():
    layer, rng = built(), np.random.default_rng(0)
    lengths = np.array([7, 8, 8, 1, 3, 11, 12])
    rows, steps = len(lengths), 2 * C + 1
    x = rng.normal(size=(rows, 12 + steps, WIDTH)).astype("float32")
    want = to_numpy(layer(ops.convert_to_tensor(x)))
    _, state = layer.extend(
        ops.convert_to_tensor(x[:, :12]), layer.initial_state(rows, 32), valid=ops.convert_to_tensor(lengths, "int32")
    )
    precomputed = layer.precompute(state)
    for step in range(steps):
        at = (lengths + step)[:, None, None]
        y, state = layer.extend(
            ops.convert_to_tensor(np.take_along_axis(x, at, axis=1)), state, precomputed=precomputed
        )
        (state,) = layer.flush([state])
        (again,) = layer.flush([state])
        assert all(np.array_equal(to_numpy(again[name]), to_numpy(state[name])) for name in state)
        assert relative_error(to_numpy(y), np.take_along_axis(want, at, axis=1)) < FLOAT32, step


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunk_size": 0}, "WeightedChunks needs chunk_size >= 1, got 0"),
        ({"key_dim": 7}, "WeightedChunks needs an even key_dim of at least 2, for rotary pairs, got 7"),
        ({"scale": "none"}, "WeightedChunks: scale must be 'normalized' or 'paper_appendix', got 'none'"),
    ],
)
def test_a_layer_refuses_what_it_cannot_be_in_its_own_name(options, said):
    with pytest.raises(ValueError, match=said):
        WeightedChunks(**options)


def test_a_stream_that_is_not_causal_is_refused():
    given = tensors(ARRAYS, "float32")
    state = SPEC.stream.initial_state(SIZES, {"chunk_size": C}, "float32")
    with pytest.raises(ValueError, match="flash_weighted can be streamed only if causal, got causal=False"):
        SPEC.stream.extend(state, **given, chunk_size=C, causal=False)
