"""What maps say is what layers do: every mixer, every option, to what float32 rounds away."""

import pkgutil

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.mixers.flash import MixedChunkAttention
from flash_tf.pictures import attention_maps
from tests import backends
from tests.contracts.test_mixers import causal_only, changes, defaults, may_be_causal, never_causal
from tests.numerics import FLOAT32, FLOAT64, relative_error

N, D = 37, 32  # N is prime: never a multiple of a chunk
DRAWN = sorted(module.name for module in pkgutil.iter_modules(attention_maps.__path__))


def either(name, options):
    """Whether a mixer may be causal or not: of most such ones, the causal layer says it all in the default tier."""
    return may_be_causal(options) and not any(only(MIXERS.get(name)) for only in (causal_only, never_causal))


CASES = [
    pytest.param(
        name,
        options,
        id=f"{name}-{option}-{options.get(option)}",
        marks=[]
        if option == "defaults" and (causal or name == "flash" or not either(name, options))
        else [pytest.mark.full],
    )
    for name in DRAWN
    for option, options in [("defaults", defaults(MIXERS.get(name))), *changes(MIXERS.get(name))]
    for causal in (False, True)[: 1 + may_be_causal(options)]
    if not (never_causal if causal else causal_only)(MIXERS.get(name))
    for options in [{**options, "causal": causal}]
]


def built(cls, options, seed=0):
    """A layer whose every weight is random, and an input `[n, d]`."""
    rng = np.random.default_rng(seed)
    backends.seed(seed)  # by chance a weight of a single token is near zero, and nothing but rounding
    layer = cls(**options)
    layer.build((1, None, D))
    for weight in layer.weights:
        weight.assign(weight + rng.normal(size=weight.shape) * (D**-0.5 if len(weight.shape) > 1 else 0.3))
    return layer, rng.normal(size=(N, D)).astype("float32").astype("float64")


def output(layer, x):
    """What the layer puts out, less the bias, which would hide the rest."""
    bias = layer.out_projection.bias
    out = layer(ops.convert_to_tensor(x[None], "float32"))
    return ops.convert_to_numpy(out if bias is None else out - bias)[0]


def part(name, parts):
    return next(part for part in parts if part.name == name)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_parts_and_the_bias_add_up_to_the_output_of_the_layer(name, options):
    layer, x = built(MIXERS.get(name), options)
    alone = (x[i : i + 1] for i in range(3))  # what one takes of itself may by chance be near nothing
    for tokens in (x, max(alone, key=lambda token: np.linalg.norm(output(layer, token)))):
        parts = attention_maps.of(name)(layer, tokens)
        assert relative_error(sum(part.output for part in parts), output(layer, tokens)) < FLOAT32
        for one in parts:
            assert one.weights.shape[1:] == one.seen.shape == (len(tokens), len(tokens))
            assert not one.weights[:, ~one.seen].any()
            assert not (options["causal"] and np.triu(one.seen, 1).any())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("silent", "left"), [("lin_k", "local"), ("quad_k", "global")])
def test_a_layer_without_one_part_puts_out_the_other(causal, silent, left):
    options = {"chunk_size": 8, "key_dim": 16, "causal": causal}
    layer, x = built(MixedChunkAttention, {**options, "relative_bias": silent != "quad_k"})
    drawn = part(left, attention_maps.of("flash")(layer, x))
    i = layer.head_names.index(silent)
    for weights in (layer.offset_scale.scales, layer.offset_scale.offsets):
        weights[i].assign(ops.zeros_like(weights[i]))
    assert relative_error(drawn.output, output(layer, x)) < FLOAT32


def test_local_weights_stay_in_the_chunk_and_causal_global_ones_before_it():
    layer, x = built(MixedChunkAttention, {"chunk_size": 8, "key_dim": 16, "causal": True})
    local, far = attention_maps.of("flash")(layer, x)
    chunk = np.arange(N) // 8
    assert (local.weights >= 0).all() and (far.weights < 0).any()
    assert (local.seen == ((chunk[:, None] == chunk) & np.tri(N, dtype=bool))).all()
    assert (far.seen == (chunk[None, :] < chunk[:, None])).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [("self_attention", {"heads": 2}), ("gau", {"kernel": "softmax", "relative_bias": False, "key_dim": 16})],
)
def test_rows_of_softmax_add_up_to_one(name, options):
    layer, x = built(MIXERS.get(name), {**options, "causal": True})
    (attention,) = attention_maps.of(name)(layer, x)
    assert relative_error(attention.weights.sum(axis=-1), np.ones(attention.weights.shape[:2])) < FLOAT64


def test_every_map_is_of_a_mixer_and_a_mixer_without_one_is_said_to_have_none():
    assert DRAWN and set(DRAWN) <= set(MIXERS.names())
    for name in {*MIXERS.names(), "a_new_one"} - set(DRAWN):
        with pytest.raises(ValueError, match=f"mixer '{name}' has no attention maps; these mixers have: .*flash"):
            attention_maps.of(name)


def test_maps_take_weights_of_bfloat16_layers():
    layer = MIXERS.get("gau")(key_dim=16, dtype=keras.DTypePolicy("bfloat16"))
    layer.build((1, None, D))
    (attention,) = attention_maps.of("gau")(layer, np.ones((5, D)))
    assert attention.weights.dtype == attention.output.dtype == "float64"
