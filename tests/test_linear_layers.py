"""Layers of linear attention against their papers, written down here once more, and against wrong input."""

import math

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import GatedLinearAttention, LinearAttention, Retention
from tests import tiers
from tests.backends import to_numpy
from tests.contracts.test_mixers import B, D, N, built, normal, outputs
from tests.numerics import FLOAT32, relative_error

H = 4


def parameters(layer, width):
    layer.build((None, None, width))
    return sum(math.prod(w.shape) for w in layer.trainable_variables)


def named(layer, name):
    return to_numpy(getattr(layer, name).kernel.value)


@tiers.full_on_jax
def test_parameters_are_as_many_as_the_papers_have():
    d = 1024
    assert parameters(LinearAttention(heads=16), d) == 4 * d * d + 4 * d  # as in self-attention
    assert parameters(Retention(), d) == 8 * d * d
    gates = 16 * (d + d // 2) + d // 2  # two factors, and a bias
    assert parameters(GatedLinearAttention(), d) == 4 * d * d + d + d // H + gates
    assert parameters(GatedLinearAttention(gates="none"), d) == 4 * d * d + d + d // H
    of_values = 16 * 2 * d + d
    assert parameters(GatedLinearAttention(gates="value"), d) == 4 * d * d + d + d // H + of_values
    assert parameters(GatedLinearAttention(gates="both"), d) == 4 * d * d + d + d // H + gates + of_values


@tiers.full_on_jax
def test_retention_is_the_authors_with_channels_in_another_order():
    layer, x = built(Retention, {"heads": H}), normal(B, N, D)
    s = D // H
    q, k, v, g = np.split(x.astype("float64") @ named(layer, "in_projection"), [D, 2 * D, 4 * D], axis=-1)
    q, k, v = (part.reshape(B, N, H, -1) for part in (q, k, v))
    # Neighbours are pairs in the authors' code: channels 2i and 2i + 1 are i and i + s/2 here.
    order = np.arange(s).reshape(2, s // 2).T.ravel()
    angle = np.repeat(1 / 10_000 ** np.linspace(0, 1, s // 2), 2)
    turn = np.outer(np.arange(N), angle)[:, None]

    def turned(part):
        part = part[..., order]
        across = np.stack([-part[..., 1::2], part[..., ::2]], axis=-1).reshape(part.shape)
        return part * np.cos(turn) + across * np.sin(turn)

    q, k = turned(q), turned(k * s**-0.5)
    out = np.zeros([B, N, H, 2 * s])
    for head in range(H):
        gamma, state = 1 - 2.0 ** (-5 - head), np.zeros([B, s, 2 * s])
        for i in range(N):
            state = gamma * state + k[:, i, head, :, None] * v[:, i, head, None, :]
            out[:, i, head] = np.einsum("bs,bse->be", q[:, i, head], state)
    out = (out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + 1e-6)).reshape(B, N, 2 * D)
    want = (g / (1 + np.exp(-g)) * out) @ named(layer, "out_projection")
    assert relative_error(outputs(layer, x), want) < FLOAT32


@tiers.full_on_jax
def test_the_authors_normalization_of_retention_is_undone_by_its_norm():
    # Rows divided by any positive number are the same after the norm, but for its epsilon.
    layer, x = built(Retention, {"heads": H}), normal(B, N, D)
    inputs, rest = layer.enter(ops.convert_to_tensor(x), ops.arange(N, dtype="int32")[None])
    out = layer.spec.fast(**inputs)
    rows = ops.convert_to_tensor(1 + np.arange(N, dtype="float32")[None, :, None, None])
    assert relative_error(to_numpy(layer.leave(out * rows, rest)), to_numpy(layer.leave(out, rest))) < FLOAT32


def test_gates_of_a_head_and_its_values_norm_are_those_of_the_formula():
    layer, x = built(GatedLinearAttention, {"heads": H, "temperature": 4.0}), normal(B, N, D)
    inputs, _ = layer.enter(ops.convert_to_tensor(x), None)
    wide = x.astype("float64")
    logits = wide @ named(layer, "decay_down") @ named(layer, "decay_up") + to_numpy(layer.decay_up.bias.value)
    alpha = (1 / (1 + np.exp(-logits))) ** (1 / 4)
    assert relative_error(np.exp(to_numpy(inputs["log_decay"])).reshape(alpha.shape), alpha) < FLOAT32
    assert keras.backend.standardize_dtype(inputs["log_decay"].dtype) == "float32"
    q, k, v = np.split(wide @ named(layer, "in_projection"), [D // 2, D], axis=-1)
    q, k, v, alpha = (part.reshape(B, N, H, -1) for part in (q, k, v, alpha))
    state, out = np.zeros([B, H, D // H // 2, D // H]), np.zeros([B, N, H, D // H])
    for i in range(N):
        state = alpha[:, i, ..., None] * state + k[:, i, ..., None] * v[:, i, :, None, :]
        out[:, i] = np.einsum("bhs,bhse->bhe", q[:, i], state)
    out /= np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + 1e-5)
    out = (out * to_numpy(layer.norm_scale.value)).reshape(B, N, D)
    gate = wide @ named(layer, "gate_projection") + to_numpy(layer.gate_projection.bias.value)
    want = (gate / (1 + np.exp(-gate)) * out) @ named(layer, "out_projection")
    assert relative_error(outputs(layer, x), want) < FLOAT32


@tiers.full_on_jax
def test_log_decays_are_float32_in_layers_of_bfloat16():
    for cls in (GatedLinearAttention, Retention):
        layer = built(cls, {"heads": H}, "bfloat16")
        inputs, _ = layer.enter(ops.convert_to_tensor(normal(B, N, D), "bfloat16"), ops.arange(N)[None])
        dtypes = {name: keras.backend.standardize_dtype(x.dtype) for name, x in inputs.items()}
        assert dtypes == {"q": "bfloat16", "k": "bfloat16", "v": "bfloat16", "log_decay": "float32"}


def test_gates_without_a_decay_are_linear_attention():
    layer = built(GatedLinearAttention, {"heads": H})
    layer.decay_up.bias.assign(np.full(layer.decay_up.bias.shape, 100.0))  # sigmoid 1
    layer.decay_up.kernel.assign(np.zeros(layer.decay_up.kernel.shape))
    plain = built(GatedLinearAttention, {"heads": H, "gates": "none"})
    for name in ("in_projection", "gate_projection", "out_projection"):
        getattr(plain, name).set_weights(getattr(layer, name).get_weights())
    plain.norm_scale.assign(layer.norm_scale)
    x = normal(B, N, D)
    assert relative_error(outputs(layer, x), outputs(plain, x)) < FLOAT32


def test_cosines_weigh_by_distance_and_not_by_the_length_of_the_text():
    options = {"heads": H, "causal": True, "features": "relu", "cosine_length": 48, "rotary": False}
    layer = built(LinearAttention, options)
    x = normal(B, 48, D)
    assert relative_error(outputs(layer, x[:, :20]), outputs(layer, x)[:, :20]) < FLOAT32
    later = outputs(layer, x[:, :20], positions=np.arange(5, 25, dtype="int32")[None])
    assert relative_error(later, outputs(layer, x[:, :20])) < FLOAT32
    assert outputs(layer, x).shape == (B, 48, D)
    with pytest.raises(ValueError, match="LinearAttention needs texts of at most cosine_length=48 tokens, got 49"):
        layer(ops.ones((B, 49, D)))


@pytest.mark.parametrize("features", ["shifted_relu", "elu_plus_one", "softplus"])
@pytest.mark.parametrize("rotary", [False, True])
def test_weights_of_positive_features_stay_positive_under_rotation(features, rotary):
    layer = built(LinearAttention, {"heads": H, "features": features, "rotary": rotary})
    inputs, _ = layer.enter(ops.convert_to_tensor(10 * normal(B, N, D)), ops.arange(N, dtype="int32")[None])
    assert all(to_numpy(inputs[name]).min() > 0 for name in ("q", "k"))


def test_the_rms_of_all_heads_together_is_one():
    layer = built(LinearAttention, {"heads": H, "causal": True, "features": "elu", "normalizer": "rms"})
    layer.out_projection.kernel.assign(np.eye(D))
    layer.out_projection.bias.assign(np.zeros(D))
    out = outputs(layer, normal(B, N, D))
    assert relative_error(np.sqrt(np.mean(out**2, axis=-1)), np.ones([B, N])) < FLOAT32


@pytest.mark.parametrize(("make", "said"), [
    (lambda: LinearAttention(heads=0), "LinearAttention needs heads >= 1, got 0"),
    (lambda: LinearAttention(features="relu2"), "LinearAttention: features must be one of 'shifted_relu', 'relu', "
     "'elu_plus_one', 'elu', 'softplus', 'favor', got 'relu2'"),
    (lambda: LinearAttention(normalizer="mean"),
     "LinearAttention: normalizer must be one of 'sum', 'rms', 'none', got 'mean'"),
    (lambda: LinearAttention(features="elu"),
     "LinearAttention: features 'elu' may be negative and need normalizer 'rms' or 'none', got 'sum'"),
    (lambda: LinearAttention(features="favor", normalizer="rms"),
     "LinearAttention: features 'favor' need normalizer 'sum' and no lrpe, got normalizer 'rms'"),
    (lambda: LinearAttention(random_features=64),
     "LinearAttention: random_features 64 needs features 'favor', got 'shifted_relu'"),
    (lambda: LinearAttention(features="favor", random_features=0),
     "LinearAttention needs random_features >= 1, got 0"),
    (lambda: LinearAttention(cosine_length=0), "LinearAttention needs cosine_length >= 1, got 0"),
    (lambda: parameters(LinearAttention(heads=3), D),
     "LinearAttention: heads must divide the width into multiples of 2, got heads 3, width 32"),
    (lambda: parameters(LinearAttention(heads=3, rotary=False), D),
     "LinearAttention: heads must divide the width, got heads 3, width 32"),
    (lambda: Retention(causal=False), "Retention is causal by definition: it needs causal true, got False"),
    (lambda: Retention(heads=0), "Retention needs heads >= 1, got 0"),
    (lambda: parameters(Retention(heads=32), D),
     "Retention: heads must divide the width into multiples of 2, got heads 32, width 32"),
    (lambda: GatedLinearAttention(causal=False),
     "GatedLinearAttention is causal by definition: it needs causal true, got False"),
    (lambda: GatedLinearAttention(gate_rank=0), "GatedLinearAttention needs gate_rank >= 1, got 0"),
    (lambda: GatedLinearAttention(temperature=0.0), "GatedLinearAttention needs temperature > 0, got 0.0"),
    (lambda: GatedLinearAttention(gates="all"),
     "GatedLinearAttention: gates must be 'key', 'value', 'both' or 'none', got 'all'"),
    (lambda: GatedLinearAttention(gates="none", gate_rank=8),
     "GatedLinearAttention: gates 'none' needs the default gate_rank and temperature, got 8 and 16.0"),
])  # fmt: skip
def test_a_wrong_option_is_refused_in_one_line(make, said):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == said
