"""The layers around the mixers, on every backend: each against its formula in NumPy, and the residual block."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

import flash_tf.layers
from flash_tf.layers import (
    GLU,
    LRPE,
    CrossGatedAttention,
    OffsetScale,
    RandomFeatures,
    RelativeBias,
    ResidualBlock,
    RotaryEmbedding,
    ScaledSinusoidalEmbedding,
    ScaleNorm,
    SimpleRMSNorm,
    T5Bias,
)
from flash_tf.layers.feedforward import FEEDFORWARDS
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.positions import token_positions
from kernels_xla.common.rotary import relative_bias
from tests import backends, tiers
from tests.backends import to_numpy
from tests.contracts.test_mixers import SMALL, packs
from tests.numerics import BFLOAT16, FLOAT32, relative_error
from tests.oracles import ORACLES
from tests.oracles.common import bias, scaled_sin

B, N, D = 2, 37, 32
OPTIONS = {  # of every layer that is in no registry, none at its default
    LRPE: {},
    CrossGatedAttention: {"key_dim": 6, "expansion": 3},
    OffsetScale: {"heads": ["q", "k"], "gamma": "normal", "use_bias": False},
    RandomFeatures: {"count": 24},
    RelativeBias: {"width": 6},
    ResidualBlock: {
        **{"norm": "layer_norm", "dropout": 0.25, "remat": True, "norm_epsilon": 1e-2, "post_norm": True},
        "norm_implementation": "xla",
    },
    RotaryEmbedding: {"base": 100.0},
    ScaledSinusoidalEmbedding: {"width": 6},
    ScaleNorm: {"epsilon": 1e-2},
    SimpleRMSNorm: {},
    T5Bias: {"window": 6, "causal": True, "scale": 2.0},
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def assigned(layer, input_shape):
    """The layer, built, with noise for weights; and these by name."""
    layer.build(input_shape)
    for i, weight in enumerate(layer.weights):
        weight.assign(normal(*weight.shape, seed=i + 1))
    return layer, {w.name: to_numpy(w.value) for w in layer.weights}


def test_every_exported_layer_is_in_a_registry_or_tested_here():
    exported = {getattr(flash_tf.layers, name) for name in flash_tf.layers.__all__}
    found = {registry.get(name) for registry in (MIXERS, FEEDFORWARDS) for name in registry.names()}
    assert OPTIONS.keys() <= exported <= found | OPTIONS.keys()


@pytest.mark.parametrize("cls", OPTIONS)
def test_every_option_is_in_the_config_and_survives_a_round_trip(cls):
    inner = {"inner": GLU(hidden=24)} if cls is ResidualBlock else {}
    layer = cls(**OPTIONS[cls], **inner)
    config = layer.get_config()
    assert {name: config[name] for name in OPTIONS[cls]} == OPTIONS[cls]
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is cls and again.get_config() == config
    assert not inner or again.inner.hidden == 24


@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
def test_scale_norm_is_its_formula(epsilon):
    layer, weights = assigned(ScaleNorm(epsilon=epsilon), (B, N, D))
    x = 0.1 * normal(B, N, D)
    assert relative_error(to_numpy(layer(x)), ORACLES["norms"](x, weights["g"], epsilon=epsilon)) < FLOAT32


def test_lrpe_is_its_formula_and_knows_distances_alone():
    layer, weights = assigned(LRPE(), (B, N, 2, 8))
    x, y, positions = normal(B, N, 2, 8), normal(B, N, 2, 8, seed=1), np.arange(N)[None] + 5
    v = np.random.default_rng(0).normal(size=8)
    mirror = np.eye(8) - 2 * np.outer(v, v) / (v @ v)
    angle = np.exp(1j * positions[..., None, None] * weights["theta"])
    mirrored = x @ mirror
    turned = (mirrored[..., :4] + 1j * mirrored[..., 4:]) * angle
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    assert relative_error(to_numpy(layer(x, positions)), want) < FLOAT32
    dots = [
        np.einsum("bihs,bihs->bih", to_numpy(layer(x, p)), to_numpy(layer(y, p + 3)))
        for p in (positions, positions + 7)
    ]
    assert relative_error(dots[0], dots[1]) < FLOAT32


def test_simple_rms_norm_is_its_formula_and_keeps_zero():
    x = 0.1 * normal(B, N, D)
    want = x / (np.linalg.norm(x, axis=-1, keepdims=True) / np.sqrt(D) + 1e-8)
    assert relative_error(to_numpy(SimpleRMSNorm()(x)), want) < FLOAT32
    assert not to_numpy(SimpleRMSNorm()(np.zeros((1, 1, D), "float32"))).any()


def test_scaled_sin_is_its_formula_and_starts_at_one_over_the_root_of_the_width():
    positions = np.array([[0, 1, 5], [7, 100, 1000]], "int32")
    layer = ScaledSinusoidalEmbedding(D)
    got = to_numpy(layer(positions))
    for row in range(2):
        assert relative_error(got[row], scaled_sin(positions[row], D, D**-0.5)) < FLOAT32
    layer.a.assign(3.0)
    assert relative_error(to_numpy(layer(positions)), 3 * D**0.5 * got) < FLOAT32


def test_far_positions_cost_bfloat16_scaled_sin_only_the_rounding_of_the_result():
    positions = np.arange(100_000, 100_050, dtype="int32")  # bfloat16 itself counts up to 256
    got = to_numpy(ScaledSinusoidalEmbedding(D, dtype="bfloat16")(positions))
    assert relative_error(got, scaled_sin(positions, D, float(ops.cast(D**-0.5, "bfloat16")))) < BFLOAT16


@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_rotary_embedding_is_its_formula_and_counts_from_zero(base):
    x, positions = normal(B, N, 2, 6), np.arange(N)[None] + np.array([[3], [50]])
    layer = RotaryEmbedding(base=base)
    assert relative_error(to_numpy(layer(x, positions)), ORACLES["rotary"](x, positions, base=base)) < FLOAT32
    assert np.array_equal(to_numpy(layer(x)), to_numpy(layer(x, np.arange(N)[None])))


def test_relative_bias_is_its_formula_of_the_distance_alone():
    layer, weights = assigned(RelativeBias(6), None)
    theta = 10_000.0 ** (-np.arange(3) / 3)
    (a1, a2), (b1, b2) = np.split(weights["a"], 2), np.split(weights["b"], 2)
    distance = (np.arange(N)[:, None] - np.arange(N)[None, :])[..., None] * theta
    want = np.sum((a1 * b1 + a2 * b2) * np.cos(distance) + (a1 * b2 - a2 * b1) * np.sin(distance), axis=-1)
    assert relative_error(to_numpy(layer(n=N)), want) < FLOAT32
    assert sum(np.prod(w.shape) for w in assigned(RelativeBias(), None)[0].weights) == 256


@pytest.mark.parametrize("kind", tiers.thinned(["flash", "flash_weighted", "gau"], "flash"))
def test_a_symmetric_bias_starts_largest_at_distance_zero_and_a_normal_one_with_either_sign(kind):
    def start(**options):
        layer = MIXERS.build({"type": kind, "key_dim": 16, "scale": "paper_appendix", **options})
        layer.build((1, 4, D))
        return to_numpy(layer.bias(n=64))[0]

    found = np.array([start(bias_start="symmetric") for _ in range(20)])
    assert (found[:, 0] > 0).all() and (found.argmax(axis=1) == 0).all() and len(set(found[:, 0])) == 20
    assert 0 < sum(start()[0] > 0 for _ in range(20)) < 20  # one sign alone: once in 500,000 runs


BUCKETS = {  # of T5, by hand from its rule: causal or not, distance -> bucket
    True: {0: 0, 7: 7, 15: 15, 16: 16, 20: 17, 100: 30, 129: 31, 199: 31},
    False: {0: 0, 5: 5, 12: 9, 199: 15, -1: 17, -7: 23, -12: 25, -100: 31},
}


@pytest.mark.parametrize("causal", BUCKETS)
def test_a_t5_bias_is_the_number_of_the_bucket_of_the_distance(causal):
    layer, weights = assigned(T5Bias(200, causal, scale=3.0), None)
    got = to_numpy(layer(n=200))
    for distance, bucket in BUCKETS[causal].items():
        i, j = (distance, 0) if distance >= 0 else (0, -distance)
        assert relative_error(got[i, j], 3 * weights["table"][bucket]) < FLOAT32, distance


@pytest.mark.parametrize("start", [65_536, 1_000_000])
def test_a_rotation_and_a_relative_bias_are_as_exact_far_out_as_at_the_start(start):
    at, x = start + np.arange(N, dtype="int32")[None], normal(1, N, 2, 128)
    assert relative_error(to_numpy(RotaryEmbedding()(x, at)), ORACLES["rotary"](x, at)) < FLOAT32
    a, b = normal(2, 128)
    for keys in (at[0], np.zeros(1, "int32")):  # close by, and at the start
        got = relative_bias(*(ops.convert_to_tensor(one) for one in (a, b, at[0], keys)))
        assert relative_error(to_numpy(got), [bias(a, b, i, keys) for i in at[0]]) < FLOAT32


def test_offset_scale_is_its_formula_for_each_head_by_name():
    layer, weights = assigned(OffsetScale(["q", "k", "other"]), (B, N, D))
    z = normal(B, N, D, seed=9)
    heads = layer(z)
    assert heads.keys() == {"q", "k", "other"}
    for name, head in heads.items():
        assert relative_error(to_numpy(head), weights[f"gamma_{name}"] * z + weights[f"beta_{name}"]) < FLOAT32


def test_offset_scale_starts_as_the_identity_or_small():
    z = normal(B, N, 10_000)
    ones, small = OffsetScale(["q"]), OffsetScale(["q"], gamma="normal")
    assert np.array_equal(to_numpy(ones(z)["q"]), z)
    small.build(z.shape)
    assert 0.019 < np.std(to_numpy(small.scales[0].value)) < 0.021


def documents(lengths):
    """`[1, n]`, documents named so that neighbours differ, padding among them."""
    return np.repeat(np.arange(len(lengths)) * 7 % 4, lengths)[None].astype("int32")


def by_loop(segment_ids):
    positions = np.zeros_like(segment_ids)
    for row, i in np.ndindex(segment_ids.shape):
        if i and segment_ids[row, i] == segment_ids[row, i - 1]:
            positions[row, i] = positions[row, i - 1] + 1
    return positions


def traced_at_unknown_length(function):
    """`function` of int32 `[b, n]`, traced before b and n are known; JAX always knows them."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, input_signature=[tf.TensorSpec([None, None], tf.int32)])


@pytest.mark.parametrize(
    "lengths",
    tiers.thinned(
        [(1,), (2,), (1, 1), (3, 1, 33), (64, 1, 2), (65, 35), (1, 99), (5, 130, 7), (1, 300, 2, 0, 40)],
        (1,),
        (1, 1),
        (64, 1, 2),
        (1, 300, 2, 0, 40),
    ),
)
def test_positions_start_again_with_each_document(lengths):
    ids = np.concatenate([documents(lengths), documents(lengths)[:, ::-1]])
    positions = lambda ids: token_positions(ids, ids)  # noqa: E731
    for function in (positions, traced_at_unknown_length(positions)):
        got = function(ops.convert_to_tensor(ids))
        assert keras.backend.standardize_dtype(got.dtype) == "int32"
        assert np.array_equal(to_numpy(got), by_loop(ids))


def test_positions_of_one_document_count_from_zero():
    for function in (token_positions, traced_at_unknown_length(token_positions)):
        assert np.array_equal(to_numpy(function(ops.zeros((B, N), "int32"))), np.arange(N)[None])


def block(inner, **options):
    """A residual block as a model of `x` and the masks that `inner` takes, with the same weights every time."""
    dtypes = {"x": "float32", "padding_mask": "bool", "segment_ids": "int32"}
    inputs = {name: keras.Input(x.shape[1:], dtype=dtypes[name], name=name) for name, x in batch(inner).items()}
    layer = ResidualBlock(inner, **options)
    backends.seed(0)
    model = keras.Model(inputs, layer(**inputs))
    for i, weight in enumerate(model.trainable_variables):
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * normal(*weight.shape, seed=i))  # 1 where it starts at 1
    return model, layer


def batch(inner):
    rng = np.random.default_rng(3)
    ids = np.concatenate([documents((16, 16, 5)), documents((5, 32))])
    given = {"x": normal(B, N, D), "padding_mask": rng.random([B, N]) < 0.8}
    return {**given, "segment_ids": ids} if packs(inner) else given


EXECUTIONS = {"eager": {"run_eagerly": True}, "graph": {"jit_compile": False}, "xla": {"jit_compile": True}}


def step(model, layer, execution):
    """The outputs in training, and the change of each weight in one large step of gradient descent."""
    before = [to_numpy(w.value) for w in model.trainable_variables]
    out = to_numpy(model(batch(layer.inner), training=True))
    for generator in [layer.dropout.seed_generator] if layer.rate else []:
        generator.state.assign([0, 11])
    model.compile(keras.optimizers.SGD(1e4), "mse", **EXECUTIONS[execution])
    model.train_on_batch(batch(layer.inner), normal(B, N, D, seed=4))
    return out, [to_numpy(w.value) - old for w, old in zip(model.trainable_variables, before, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("kind", MIXERS.names())
def test_recomputing_changes_neither_value_nor_gradient(kind):
    cls = MIXERS.get(kind)
    small = {**SMALL, "causal": not getattr(cls, "never_causal", False)}
    options = {name: small[name] for name in inspect.signature(cls).parameters if name in small}
    want, deltas = step(*block(cls(**options)), "eager")
    assert all(np.any(delta) for delta in deltas)
    for execution in EXECUTIONS:
        out, recomputed = step(*block(cls(**options), remat=True), execution)
        assert relative_error(out, want) < FLOAT32
        for got, delta in zip(recomputed, deltas, strict=True):
            assert relative_error(got, delta) < FLOAT32, execution


@pytest.mark.parametrize("execution", tiers.thinned(EXECUTIONS, "eager", "xla"))
def test_recomputing_keeps_the_dropped_numbers_of_a_seed(execution):
    inner = lambda: MIXERS.build({"type": "self_attention", "heads": 2})  # noqa: E731  a mixer, because it takes masks
    _, kept = step(*block(inner(), dropout=0.5), execution)
    _, recomputed = step(*block(inner(), dropout=0.5, remat=True), execution)
    for got, delta in zip(recomputed, kept, strict=True):
        assert np.any(delta) and relative_error(got, delta) < FLOAT32


def test_dropout_follows_from_its_seed_alone():
    layer, outs, x = ResidualBlock(GLU(hidden=24), dropout=0.5, remat=True), [], normal(B, N, D)
    for seed in (1, 1, 2):
        layer.dropout.seed_generator.state.assign([0, seed])
        outs.append(to_numpy(layer(x, training=True)))
    assert np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[0], outs[2])
    assert 0.4 < np.mean(outs[0] == x) < 0.6
    assert np.array_equal(to_numpy(layer(x)), to_numpy(layer(x)))
    assert np.mean(to_numpy(layer(x)) == x) < 0.01  # a sum may be rounded to one of its terms


@pytest.mark.parametrize("norm", ["scale_norm", "layer_norm"])
def test_a_block_adds_its_inner_layer_of_the_normalized_input(norm):
    layer = ResidualBlock(GLU(hidden=24), norm=norm)
    x = normal(B, N, D)
    out = to_numpy(layer(x))
    centred = x - x.mean(-1, keepdims=True) if norm == "layer_norm" else x
    normalized = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    assert relative_error(out - x, to_numpy(layer.inner(normalized))) < 10 * FLOAT32  # out - x cancels


@pytest.mark.parametrize("make", [
    lambda: ScaleNorm(epsilon=0),
    lambda: ScaledSinusoidalEmbedding(7),
    lambda: RelativeBias(7),
    lambda: RelativeBias(start="x"),
    lambda: RotaryEmbedding(base=1.0),
    lambda: T5Bias(0),
    lambda: OffsetScale(["q"], gamma="zeros"),
    lambda: ResidualBlock(GLU(), dropout=1.0),
    lambda: ResidualBlock(GLU(), norm="batch_norm"),
    lambda: ResidualBlock(GLU(), norm_epsilon=0.0),
    lambda: ResidualBlock(GLU(), norm="simple_rms_norm", norm_epsilon=1e-3),
])  # fmt: skip
def test_an_impossible_option_is_refused_in_one_line_that_says_what_came(make):
    with pytest.raises(ValueError, match=r"^[^\n]*(got|needs)[^\n]*$"):
        make()


@pytest.mark.parametrize("name", FEEDFORWARDS.names())
def test_an_activation_that_keras_lacks_is_named_at_construction(name):
    with pytest.raises(ValueError, match=r"^\w+: activation must be the name of a Keras activation, .* got 'gleu'$"):
        FEEDFORWARDS.build({"type": name, "activation": "gleu"})


@pytest.mark.one_backend
def test_a_residual_block_names_the_layer_that_it_cannot_call():
    for inner, said in [
        ({"type": "flash"}, "inner must be Layer, got {'type': 'flash'}"),
        (keras.layers.Dense(D), "needs a layer whose call takes padding_mask, segment_ids, positions, .* got Dense"),
    ]:
        with pytest.raises(ValueError, match=f"ResidualBlock:? {said}"):
            ResidualBlock(inner)


@pytest.mark.one_backend
def test_a_config_makes_as_many_residual_blocks_as_are_asked():
    config = ResidualBlock(GLU(), dropout=0.1).get_config()
    assert ResidualBlock.from_config(config).get_config() == ResidualBlock.from_config(config).get_config() == config
