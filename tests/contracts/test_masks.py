"""Keras' own masks reach every mixer, and nothing that stands at padding reaches anything else."""

import re

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import GLU, CrossGatedAttention, ResidualBlock
from flash_tf.layers.mixers import MIXERS
from flash_tf.models import Classifier
from tests import tiers
from tests.backends import tensors, to_numpy, value_and_gradients
from tests.contracts.test_mixers import B, D, defaults, may_be_causal, never_causal
from tests.numerics import FLOAT32, relative_error

LENGTH, PADDED = 8, 21  # PADDED is no multiple of a chunk
IDS = np.random.default_rng(0).integers(1, 50, [B, LENGTH]).astype("int32")
LONG = np.pad(IDS, [[0, 0], [0, PADDED - LENGTH]])
REAL = LONG > 0
KINDS = [
    pytest.param(kind, causal, id=f"{kind}-{'causal' if causal else 'bidirectional'}")
    for kind in MIXERS.names()
    for causal in (False, True)
    if not (causal and never_causal(MIXERS.get(kind)))
    if causal or not getattr(MIXERS.get(kind), "causal_only", False)
    if may_be_causal(defaults(MIXERS.get(kind)))
]
every_mixer = pytest.mark.parametrize(("kind", "causal"), KINDS)
# The cast of a mask is in the base classes.
some_mixers = pytest.mark.parametrize(
    ("kind", "causal"), tiers.of_kinds(KINDS, "flash", "self_attention", "linear_attention", "nystromformer")
)


def no_number(wrong):
    """Cases with NaN, and with infinity where a mixer takes what is largest: NaN compares to nothing."""
    kinds = KINDS if np.isnan(wrong) else tiers.of_kinds(KINDS, "flash", "self_attention", "informer", "reformer")
    return [pytest.param(*case.values, wrong, id=f"{wrong}-{case.id}", marks=case.marks) for case in kinds]


def made(kind, causal):
    """A mixer with random weights, whose output is near 1 for inputs near 1."""
    layer = MIXERS.get(kind)(**{**defaults(MIXERS.get(kind)), "causal": causal})
    return randomized(layer, [(None, None, D)])


def randomized(layer, shapes):
    layer.build(*shapes)
    rng = np.random.default_rng(1)
    for weight in layer.trainable_weights:
        weight.assign(weight + rng.normal(size=weight.shape) * (D**-0.5 if len(weight.shape) > 1 else 0.3))
    return layer


def embedding():
    layer = keras.layers.Embedding(50, D, mask_zero=True)
    layer.build((None, None))
    layer.embeddings.assign(np.random.default_rng(2).normal(size=(50, D)))
    return layer


def run(call, ids):
    """What a functional model of an embedding with a mask and `call` gives."""
    inputs = keras.Input((None,), dtype="int32")
    return to_numpy(keras.Model(inputs, call(embedding()(inputs)))(ids))


@every_mixer
def test_a_row_padded_under_keras_mask_equals_the_row_alone(kind, causal):
    layer = made(kind, causal)
    alone, padded = run(layer, IDS), run(layer, LONG)
    assert np.sqrt(np.mean(alone**2)) > 0.1  # a layer that puts out nothing would pass
    assert relative_error(padded[:, :LENGTH], alone) < FLOAT32


def test_keras_mask_is_taken_from_x_beside_other_tensors_and_an_explicit_mask_wins():
    layer = made("self_attention", False)
    positions = ops.arange(PADDED, dtype="int32")[None]
    with_positions = lambda x: layer(x, positions=positions)  # noqa: E731
    assert relative_error(run(with_positions, LONG)[:, :LENGTH], run(layer, IDS)) < FLOAT32
    x = embedding()(LONG)
    assert relative_error(to_numpy(layer(x, mask=ops.convert_to_tensor(REAL)))[:, :LENGTH], run(layer, IDS)) < FLOAT32
    everything = ops.ones(LONG.shape, "bool")
    unmasked = layer(ops.convert_to_tensor(to_numpy(x), dtype="float32"))
    assert relative_error(to_numpy(layer(x, padding_mask=everything)), to_numpy(unmasked)) < FLOAT32


def test_a_block_and_the_layers_behind_it_see_the_mask():
    first = ResidualBlock(made("flash", False))
    second = randomized(ResidualBlock(made("gau", False)), [(None, None, D)])
    stack = lambda x: keras.layers.GlobalAveragePooling1D()(second(first(x)))  # noqa: E731
    assert relative_error(run(stack, LONG), run(stack, IDS)) < FLOAT32


@some_mixers
def test_a_padding_mask_may_have_any_number_at_real_tokens(kind, causal):
    layer, x = made(kind, causal), embedding()(LONG)
    want = to_numpy(layer(x, padding_mask=ops.convert_to_tensor(REAL)))[REAL]
    for numbers in (LONG, -0.3 * LONG):
        got = to_numpy(layer(x, padding_mask=ops.convert_to_tensor(numbers)))[REAL]
        assert relative_error(got, want) < FLOAT32


def test_what_follows_cross_attention_sees_the_mask():
    layer = randomized(CrossGatedAttention(key_dim=16), [(None, None, D), (None, None, D)])
    pooled = lambda x: keras.layers.GlobalAveragePooling1D()(layer(x, x))  # noqa: E731
    assert relative_error(run(pooled, LONG), run(pooled, IDS)) < FLOAT32


@pytest.mark.one_backend
def test_bad_inputs_of_cross_attention_are_one_clear_error():
    layer, x = CrossGatedAttention(key_dim=16), np.ones((B, LENGTH, D), "float32")
    with pytest.raises(ValueError, match=re.escape(f"needs memory of the shape [b, n, d], got {(LENGTH, D)}")):
        CrossGatedAttention(key_dim=16)(x, x[0])
    with pytest.raises(ValueError, match=re.escape(f"memory_mask needs the shape [b, n] = {(B, LENGTH)} of the text")):
        layer(x, x, memory_mask=np.ones((B, 3), bool))


def test_cross_attention_takes_the_mask_of_its_memory():
    layer = randomized(CrossGatedAttention(key_dim=16), [(None, None, D), (None, None, D)])
    x = ops.convert_to_tensor(np.random.default_rng(3).normal(size=(B, 5, D)), dtype="float32")
    table = embedding()
    assert relative_error(to_numpy(layer(x, table(LONG))), to_numpy(layer(x, table(IDS)))) < FLOAT32


@pytest.mark.one_backend
@pytest.mark.parametrize(("kind", "causal", "wrong"), no_number(np.nan) + no_number(np.inf))
def test_what_is_no_number_at_padding_reaches_no_output_and_no_gradient(kind, causal, wrong):
    layer = made(kind, causal)
    x = np.random.default_rng(4).normal(size=(B, PADDED, D))
    names = [weight.path for weight in layer.trainable_weights]

    def outputs(values):
        arrays = {"x": np.where(REAL[..., None], x, values)}

        def call(x, **weights):
            with keras.StatelessScope([(w, weights[w.path]) for w in layer.trainable_weights]):
                return layer(x, padding_mask=ops.convert_to_tensor(REAL))

        weights = {weight.path: to_numpy(weight.value) for weight in layer.trainable_weights}
        cotangent = lambda shape: np.where(REAL[..., None], np.random.default_rng(5).normal(size=shape), 0)  # noqa: E731
        out, found = value_and_gradients(call, tensors({**arrays, **weights}, "float32"), cotangent)
        return {
            "out": to_numpy(out)[REAL],
            "dx": to_numpy(found["x"]),
            **{name: to_numpy(found[name]) for name in names},
        }

    got, want = outputs(wrong), outputs(0.0)
    for name in want:
        assert np.isfinite(got[name]).all(), name
        assert np.array_equal(got[name], want[name]), name


def test_a_classifier_honours_the_mask_of_its_input():
    options = {"mixer": {"type": "flash", "chunk_size": 8, "key_dim": 16}, "position_embedding": None}
    model = randomized(Classifier(3, vocabulary_size=50, width=D, depth=2, **options), [])
    got = to_numpy(model(ops.convert_to_tensor(LONG), mask=ops.convert_to_tensor(REAL)))
    assert relative_error(got, to_numpy(model(ops.convert_to_tensor(IDS)))) < FLOAT32
    assert relative_error(to_numpy(model(ops.convert_to_tensor(LONG))), got) > FLOAT32  # the mask made the difference
    numbers = to_numpy(model(ops.convert_to_tensor(LONG), padding_mask=ops.convert_to_tensor(-7 * LONG)))
    assert relative_error(numbers, got) < FLOAT32


@pytest.mark.one_backend
@pytest.mark.parametrize("shape", [(B, LENGTH + 1), (1, LENGTH), (LENGTH,), (B, LENGTH, LENGTH), (B, 1, 1, LENGTH)])
@pytest.mark.parametrize("name", ["padding_mask", "segment_ids"])
def test_a_mask_of_another_shape_than_the_text_is_one_clear_error(name, shape):
    needed = re.escape(f"{name} needs the shape [b, n] = {(B, LENGTH)} of the text, got {shape}")
    with pytest.raises(ValueError, match=needed):
        ResidualBlock(GLU())(np.ones((B, LENGTH, D), "float32"), **{name: np.ones(shape, "int32")})


@pytest.mark.one_backend
def test_a_prefix_mask_of_another_shape_than_the_text_is_one_clear_error():
    layer = MIXERS.get("gau")(key_dim=8, causal=True)
    needed = re.escape(f"prefix_mask needs the shape [b, n] = {(B, LENGTH)} of the text, got {(1, LENGTH)}")
    with pytest.raises(ValueError, match=needed):
        layer(np.ones((B, LENGTH, D), "float32"), prefix_mask=np.ones((1, LENGTH), "bool"))


@pytest.mark.one_backend
@pytest.mark.parametrize("shape", [(LENGTH,), (1, LENGTH + 1), (B + 1, LENGTH), (1, B, LENGTH)])
@pytest.mark.parametrize("kind", ["self_attention", "flash", "gau", "linear_attention"])
def test_positions_of_another_shape_than_the_text_are_one_clear_error(kind, shape):
    layer = MIXERS.get(kind)(**defaults(MIXERS.get(kind)))
    needed = re.escape(f"positions need the shape [1, n] or [b, n] of a text {(B, LENGTH)}, got {shape}")
    with pytest.raises(ValueError, match=needed):
        layer(np.ones((B, LENGTH, D), "float32"), positions=np.zeros(shape, "int32"))
