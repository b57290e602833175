"""Layers around a kernel or an activation, each against its formula in NumPy."""

import keras
import numpy as np
import pytest

from flash_tf.layers import GLU, MLP, GatedAttentionUnit, MixedChunkAttention, MultiHeadSelfAttention
from flash_tf.layers.streaming import normalized
from tests.backends import tensors, to_numpy
from tests.numerics import FLOAT32, relative_error
from tests.oracles import ORACLES

B, N, D = 2, 11, 8
X = np.random.default_rng(0).normal(size=[B, N, D]).astype("float32")
POSITIONS = np.tile(np.arange(N), (B, 1))
FLASH_HEADS = ("quad_q", "quad_k", "lin_q", "lin_k")


def silu(x):
    return x / (1 + np.exp(-x))


def dense(projection, x):
    return x @ to_numpy(projection.kernel) + (to_numpy(projection.bias) if projection.use_bias else 0)


def built(cls, **options):
    layer, rng = cls(**options), np.random.default_rng(1)
    layer.build((B, N, D))
    for weight in layer.weights:
        weight.assign(np.round(to_numpy(weight.value)) + 0.3 * rng.normal(size=weight.shape))
    return layer


def output(layer):
    return to_numpy(layer(tensors({"x": X}, "float32")["x"]))


def rotated(x, heads=1):
    return ORACLES["rotary"](x.reshape(B, N, heads, -1), POSITIONS)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("cls", "options", "turned"),
    [
        (MixedChunkAttention, {}, FLASH_HEADS),
        (MixedChunkAttention, {"use_bias": False}, FLASH_HEADS),
        (MixedChunkAttention, {"rotary_heads": "local"}, FLASH_HEADS[:2]),
        (MixedChunkAttention, {"rotary_heads": "none"}, ()),
        (GatedAttentionUnit, {}, ("q", "k")),
        (GatedAttentionUnit, {"use_bias": False}, ("q", "k")),
    ],
)
def test_flash_and_gau_gate_what_their_rotated_heads_attend_to(cls, options, turned, causal):
    chunk = {"chunk_size": 4} if cls is MixedChunkAttention else {}
    layer = built(cls, key_dim=6, expansion=2, causal=causal, **chunk, **options)
    weights = {weight.name: to_numpy(weight.value) for weight in layer.weights}
    biases = [weight.path for weight in layer.weights if weight.name == "bias" or weight.name.startswith("beta_")]
    assert len(biases) == (2 + len(layer.head_names)) * layer.use_bias
    u, v, z = np.split(silu(dense(layer.in_projection, X)), [2 * D, 4 * D], axis=-1)
    heads = {name: z * weights[f"gamma_{name}"] + weights.get(f"beta_{name}", 0) for name in layer.head_names}
    heads = {name: rotated(x) if name in turned else x[:, :, None] for name, x in heads.items()}
    given = {**heads, "v": v[:, :, None]} if cls is GatedAttentionUnit else {k: x[:, :, 0] for k, x in heads.items()}
    bias = {name: to_numpy(getattr(layer.bias, name)) for name in "ab"}
    attended = ORACLES[layer.spec.name](**{"v": v, **given}, **bias, causal=causal, **chunk).reshape(B, N, -1)
    assert relative_error(output(layer), dense(layer.out_projection, u * attended)) < FLOAT32


def test_self_attention_rotates_queries_and_keys():
    layer = built(MultiHeadSelfAttention, heads=2, rotary=True)
    q, k, v = np.split(dense(layer.in_projection, X), 3, axis=-1)
    attended = ORACLES["softmax_attention"](rotated(q, 2), rotated(k, 2), v.reshape(B, N, 2, -1)).reshape(B, N, D)
    assert relative_error(output(layer), dense(layer.out_projection, attended)) < FLOAT32


def test_a_feedforward_layer_activates_its_first_branch():
    layer = built(GLU, hidden=6, activation="silu")
    gate, value = np.split(dense(layer.in_projection, X), 2, axis=-1)
    assert relative_error(output(layer), dense(layer.out_projection, silu(gate) * value)) < FLOAT32
    layer = built(MLP, hidden=6, activation="silu")
    assert relative_error(output(layer), dense(layer.out_projection, silu(dense(layer.in_projection, X)))) < FLOAT32


@pytest.mark.parametrize("shape", [(1, 1, D), (B, 1, D)])
def test_a_layer_norm_in_a_stream_is_that_of_keras(shape):
    norm = keras.layers.LayerNormalization()
    norm.build(shape)
    x = tensors({"x": 1 + 2 * X[: shape[0], :1]}, "float32")["x"]
    assert relative_error(to_numpy(normalized(norm, x)), to_numpy(norm(x))) < FLOAT32
