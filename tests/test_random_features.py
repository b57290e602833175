"""FAVOR+ against its formula and against softmax attention, its directions, and numbers that are too large."""

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.generation import decoding
from flash_tf.layers import LinearAttention, MultiHeadSelfAttention, RandomFeatures
from flash_tf.layers.random_features import orthogonal_normal
from flash_tf.models import MODELS
from kernels_xla.common.random_features import random_features
from kernels_xla.linear_attention import linear_attention
from tests import tiers
from tests.backends import compiled, differentiate, tensors, to_numpy, value_and_gradients
from tests.contracts.test_mixers import B, D, N, built, normal, outputs
from tests.numerics import BFLOAT16, FLOAT32, FLOAT64, RANDOM_FEATURES, masks, real_tokens, relative_error
from tests.oracles import ORACLES

H = 4
FAVOR = {"heads": H, "features": "favor"}


def made(**options):
    """A layer with noise for weights, but for the directions, which are as they are drawn."""
    layer = built(LinearAttention, {**FAVOR, **options})
    layer.favor.directions.assign(orthogonal_normal(layer.favor.count, D // H))
    return layer


def product(dense, x):
    return x @ to_numpy(dense.kernel.value) + to_numpy(dense.bias.value)


@pytest.mark.parametrize("layout", ["whole", "padded", "packed"])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@tiers.full_on_jax
def test_the_layer_is_its_formula(causal, rotary, layout):
    layer, x, masked = made(causal=causal, rotary=rotary, random_features=20), 0.5 * normal(B, N, D), masks(layout)
    positions = np.broadcast_to(np.arange(N)[None] + 3, (B, N)).astype("int32")
    parts = np.split(product(layer.in_projection, x.astype("float64")), 3, axis=-1)
    q, k, v = (part.reshape(B, N, H, D // H) for part in parts)
    q, k = (ORACLES["rotary"](part, positions) for part in (q, k)) if rotary else (q, k)
    q, k = (ORACLES["random_features"](part, orthogonal_normal(20, D // H)) / 20**0.5 for part in (q, k))
    want = ORACLES["linear_attention"](q, k, v, causal=causal, normalized=True, **masked)
    real = real_tokens(masked)
    got = outputs(layer, x, positions=positions, **masked)
    assert relative_error(got[real], product(layer.out_projection, want.reshape(B, N, D))[real]) < FLOAT32


@pytest.mark.parametrize("causal", [False, True])
def test_many_features_are_softmax_attention(causal):
    softmax, x, found = built(MultiHeadSelfAttention, {"heads": H, "causal": causal}), 0.5 * normal(B, N, D), {}
    for count in (128, 8192):
        layer = made(causal=causal, rotary=True, random_features=count)
        for name in ("in_projection", "out_projection"):
            getattr(layer, name).set_weights(getattr(softmax, name).get_weights())
            getattr(layer, name).bias.assign(np.zeros(getattr(layer, name).bias.shape))
            getattr(softmax, name).bias.assign(np.zeros(getattr(layer, name).bias.shape))
        found[count] = relative_error(outputs(layer, x), outputs(softmax, x))
    assert found[8192] < RANDOM_FEATURES < found[128], found


@pytest.mark.parametrize(("rows", "width"), [(128, 64), (128, 48), (20, 8), (5, 8)])
def test_directions_are_at_right_angles_in_blocks_and_as_long_as_normal_ones(rows, width):
    drawn = orthogonal_normal(rows, width)
    assert drawn.shape == (rows, width) and np.array_equal(drawn, orthogonal_normal(rows, width))
    lengths = np.linalg.norm(drawn, axis=1)
    assert len(np.unique(lengths)) == rows
    for first in range(0, rows, width):
        block = drawn[first : first + width] / lengths[first : first + width, None]
        assert relative_error(block @ block.T, np.eye(len(block))) < FLOAT64


def test_directions_have_the_moments_of_normal_rows():
    drawn = orthogonal_normal(80_000, 8)  # of sums of 80,000 numbers of one variance the deviation is 0.0035
    assert np.abs(drawn.mean(axis=0)).max() < 0.02
    assert np.abs(drawn.T @ drawn / len(drawn) - np.eye(8)).max() < 0.03
    assert np.sum(drawn**2, axis=1).var() == pytest.approx(2 * 8, rel=0.05)


def test_directions_are_weights_that_are_not_trained_and_the_same_in_every_layer(tmp_path):
    layers = [LinearAttention(**FAVOR, name=name) for name in ("one", "other")]
    for layer in layers:
        layer.build((B, N, D))
        (directions,) = layer.non_trainable_weights
        assert directions.path.endswith("favor/directions") and directions.shape == (128, D // H)
        assert np.array_equal(to_numpy(directions.value), np.float32(orthogonal_normal(128, D // H)))
        assert {w.path for w in layer.weights} - {w.path for w in layer.trainable_weights} == {directions.path}
    layers[0].favor.directions.assign(normal(128, D // H))  # as of another NumPy
    x, inputs = normal(B, N, D), keras.Input((None, D))
    keras.Model(inputs, layers[0](inputs)).save(tmp_path / "layer.keras")
    again = keras.saving.load_model(tmp_path / "layer.keras")
    assert np.array_equal(outputs(again, x), outputs(layers[0], x))


@tiers.full_on_jax
def test_decoding_in_bfloat16_takes_the_directions_that_training_takes():
    mixer = {"type": "linear_attention", **FAVOR, "rotary": False}
    sizes = {"vocabulary_size": 50, "width": D, "depth": 1, "feedforward": {"type": "glu"}}
    model = MODELS.build({"type": "causal_lm", "mixer": mixer, **sizes, "dtype": "mixed_bfloat16"})
    model.build()
    layer, seen = model.mixers[0], {}
    enter = layer.enter
    layer.enter = lambda x, positions: seen.setdefault("features", enter(x, positions))
    ids = ops.convert_to_tensor(np.arange(B)[:, None].astype("int32"))
    model(ids)
    want, state = seen.pop("features")[0]["k"], model.initial_state(B)
    decoding.next_logits(model, decoding.cast_weights(model, state), ids[:, 0], state)
    assert np.array_equal(to_numpy(seen["features"][0]["k"]), to_numpy(want))


def test_gradients_of_attention_to_the_strongest_keys_are_those_of_float64():
    width, rng = 64, np.random.default_rng(0)
    directions = orthogonal_normal(128, width)
    arrays = {name: rng.normal(size=(1, 6, 1, width)) for name in "qkv"}
    for i in (1, 4):  # keys of the largest features: denominators beyond the root of float32's largest number
        arrays["k"][0, i, 0] = directions[np.argsort(np.sum(directions**2, axis=1))[-i]] * width**0.25

    def attend(q, k, v):
        p = ops.cast(directions, q.dtype)
        return linear_attention(random_features(q, p, query=True), random_features(k, p), v, normalized=True)

    want = differentiate(attend, {}, arrays, dtype="float64")
    cotangent = lambda shape: np.random.default_rng(1).normal(size=shape)  # noqa: E731  as `differentiate` has it
    in_one = compiled(lambda **given: value_and_gradients(attend, given, cotangent))
    _, found = in_one(**tensors(arrays, "float32"))
    for name in "qv":
        assert relative_error(to_numpy(found[name]), want[f"d{name}"]) < FLOAT32, name
    # Their own gradient vanishes: they have all of the weight.
    assert np.abs(to_numpy(found["k"]) - want["dk"]).max() < FLOAT32 > 1e4 * np.abs(want["dk"]).max()


def test_float16_is_refused():
    with pytest.raises(ValueError, match="RandomFeatures needs the range of bfloat16 or float32, got float16"):
        RandomFeatures(dtype="mixed_float16").build((B, N, H, D // H))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("query", [False, True])
def test_features_of_the_strongest_keys_and_queries_are_finite_and_so_are_their_gradients(query, dtype):
    width = 64
    directions = orthogonal_normal(128, width)
    longest = directions[[np.argmax(np.sum(directions**2, axis=1))]] * width**0.25  # the key of the largest feature
    x = np.concatenate([longest * size for size in (0, 1, 1.1, 10, 1e4, -1e4, 1e30)])[None, :, None]
    found = differentiate(random_features, {"query": query}, {"x": x, "directions": directions}, dtype=dtype)
    assert all(np.isfinite(value).all() for value in found.values())
    if query:
        assert relative_error(found["out"].max(axis=-1), np.full([1, 7, 1], 1e6)) < BFLOAT16
    else:
        assert np.exp(40) < found["out"].max() < np.exp(46)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("size", [10, 100, 1e4])
def test_a_layer_of_strong_inputs_puts_out_numbers(policy, size):
    layer = built(LinearAttention, {**FAVOR, "causal": True}, policy)
    assert np.isfinite(outputs(layer, size * normal(B, N, D))).all()


def test_a_query_among_large_keys_reads_the_mean_of_what_it_sees():
    # Equal keys, orthogonal to all directions: exp(-22) each, and 37 of them are far below a floor of 1e-6.
    layer = made(causal=True, rotary=False)
    directions = np.zeros([128, D // H])
    directions[:, 0] = np.linspace(-1, 1, 128)
    layer.favor.directions.assign(directions)
    q, k, v = np.zeros([B, N, H, D // H]), np.zeros([B, N, H, D // H]), normal(B, N, H, D // H)
    q[..., 0], k[..., 1] = 40, (2 * 22) ** 0.5 * (D // H) ** 0.25
    q, k, v = (ops.convert_to_tensor(part, "float32") for part in (q, k, v))
    out = to_numpy(layer.spec.fast(layer.favor(q, query=True), layer.favor(k), v, **layer.case))
    v = to_numpy(v)
    want = np.cumsum(v, axis=1) / np.arange(1, N + 1)[:, None, None]
    assert relative_error(out, want) < FLOAT32


def test_features_need_a_count():
    with pytest.raises(ValueError, match="RandomFeatures needs count >= 1, got 0"):
        RandomFeatures(0)
