"""The fused gate of a gated linear unit is its function, in value and every gradient. Pallas interprets it."""

import math

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import GLU
from flash_tf.layers.common import activation as einsum_activation
from flash_tf.models import CausalLM
from kernels_pallas import glu as fused
from kernels_pallas import programs
from kernels_xla.common import nvidia
from tests import backends, tiers
from tests.fused import step
from tests.numerics import ALIVE, BFLOAT16_FACTOR, FLOAT32, errors

SHAPE = 2, 48, 192  # programs of 16 tokens: six, of one block of 64 columns in three
WIDE = 4.0  # so that gates reach both tails of the normal distribution


def drawn(shape=SHAPE):
    rng = np.random.default_rng(0)
    arrays = {"p": WIDE * rng.normal(size=(*shape[:-1], 2 * shape[-1])), "bias": rng.normal(size=2 * shape[-1])}
    return {name: a.astype("float32").astype("float64") for name, a in arrays.items()}


def cotangent(shape):
    given = np.random.default_rng(1).normal(size=shape)
    return np.round(given * 16) / 16  # exact in bfloat16


def normal(x):
    """The distribution, by its tail, which does not cancel, and the density."""
    tail = np.vectorize(math.erfc)(-x * math.sqrt(0.5))
    return tail / 2, np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def activated(name, x):
    """An activation and its derivative."""
    if name == "silu":
        c = 1 / (1 + np.exp(-x))
        return x * c, c + x * c * (1 - c)
    if name == "gelu":
        c, density = normal(x)
        return x * c, c + x * density
    t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t**2) / 2 * slope


def oracle(p, bias, name):
    gate, value = np.split(p + bias, 2, axis=-1)
    y, slope = activated(name, gate)
    given = cotangent(value.shape)
    dp = np.concatenate([given * value * slope, given * y], axis=-1)
    return {"value": y * value, "p": dp, "bias": dp.sum((0, 1))}


def einsums(p, bias, activation):
    gate, value = ops.split(p + bias, 2, axis=-1)
    return einsum_activation(activation)(gate) * value


def measured(arrays, name, dtype="float32", gate=fused.gated):
    run = lambda p, bias: gate(p, bias, activation=name)  # noqa: E731
    value, gradients = backends.value_and_gradients(run, backends.tensors(arrays, dtype), cotangent)
    return {"value": backends.to_numpy(value), **{key: backends.to_numpy(g) for key, g in gradients.items()}}


@pytest.mark.parametrize("name", fused.ACTIVATIONS)
@pytest.mark.parametrize("shape", [SHAPE, (1, 7, 64), (128, 2, 256)])
def test_it_is_the_oracle_in_value_and_every_gradient(shape, name, interpreted):
    arrays = drawn(shape)
    want = oracle(**arrays, name=name)
    found = errors(measured(arrays, name), want)
    assert max(found.values()) < FLOAT32, found
    assert min(np.count_nonzero(x) / x.size for x in want.values()) > ALIVE


@tiers.full_on_jax
@pytest.mark.parametrize("name", fused.ACTIVATIONS)
def test_in_bfloat16_it_is_as_exact_as_the_einsums(name, interpreted):
    arrays = drawn()
    want = oracle(**arrays, name=name)
    found, least = (errors(measured(arrays, name, "bfloat16", gate), want) for gate in (fused.gated, einsums))
    assert all(found[key] < BFLOAT16_FACTOR * least[key] for key in found), (found, least)


@tiers.full_on_jax
def test_in_bfloat16_each_number_is_rounded_once(interpreted):
    rounded = lambda a: backends.to_numpy(ops.cast(ops.convert_to_tensor(a, "bfloat16"), "float32"))  # noqa: E731
    arrays = {name: rounded(a).astype("float64") for name, a in drawn().items()}
    arrays["bias"] = rounded(arrays["bias"] + 32).astype("float64")  # einsums round the sum to multiples of 1/4
    want = oracle(**arrays, name="silu")
    found, least = (errors(measured(arrays, "silu", "bfloat16", gate), want) for gate in (fused.gated, einsums))
    assert max(found.values()) < 2**-9 < max(least.values()), (found, least)


def layers(dtype="float32", width=16, **options):
    """A layer for each implementation, with the same weights, none at its start."""
    found, rng = {}, np.random.default_rng(2)
    for name in ("xla", "pallas"):
        found[name] = GLU(hidden=64, implementation=name, dtype=dtype, name="glu", **options)
        found[name].build((None, None, width))
    weights = [w + 0.3 * rng.normal(size=w.shape) for w in found["xla"].get_weights()]
    for layer in found.values():
        layer.set_weights(weights)
    return found


@pytest.mark.parametrize("options", [{}, {"activation": "silu", "use_bias": False}, {"activation": "gelu_tanh"}])
@pytest.mark.parametrize("dtype", tiers.thinned_on_jax(["float32", "mixed_bfloat16"], "mixed_bfloat16"))
def test_a_layer_trains_with_it_as_with_einsums(dtype, options, interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    both = layers(dtype, **options)
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(2, 8, 16)), both["xla"].compute_dtype)
    found = {name: step(layer, x) for name, layer in both.items()}
    exact = step(layers(**options)["xla"], ops.cast(x, "float32"))
    error = {name: errors(got, exact) for name, got in found.items()}
    assert all(e < max(FLOAT32, BFLOAT16_FACTOR * error["xla"][name]) for name, e in error["pallas"].items()), error
    monkeypatch.setattr(programs, "run", None)  # whoever calls it, fails
    both["pallas"](x)
    GLU(dtype=dtype)(x, training=True)
    with pytest.raises(TypeError):
        both["pallas"](x, training=True)


@tiers.full_on_jax
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 4, 16)])
def test_a_layer_takes_any_rank(shape, interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=shape), "float32")
    got, want = (backends.to_numpy(layer(x, training=True)) for layer in reversed(layers().values()))
    assert got.shape == want.shape == shape
    assert errors({"out": got}, {"out": want})["out"] < FLOAT32


@tiers.full_on_jax
def test_a_model_trains_with_the_option_of_its_feedforward(interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    ids, found = ops.convert_to_tensor(np.random.default_rng(0).integers(0, 40, (2, 16)), "int32"), {}
    for name in ("xla", "pallas"):
        backends.seed(0)
        feedforward = {"type": "glu", "hidden": 64, "implementation": name}
        model = CausalLM(40, width=16, depth=2, mixer={"type": "self_attention", "heads": 2}, feedforward=feedforward)
        assert CausalLM.from_config(model.get_config()).blocks[1].inner.implementation == name
        found[name] = backends.to_numpy(model(ids, training=True))
    assert errors({"logits": found["pallas"]}, {"logits": found["xla"]})["logits"] < FLOAT32
    monkeypatch.setattr(programs, "run", None)
    with pytest.raises(TypeError):
        model(ids, training=True)


@tiers.full_on_jax
def test_one_line_says_what_it_needs():
    x, needs = ops.ones((1, 16, 24)), "GLU: implementation 'pallas' needs "
    with pytest.raises(ValueError, match=needs + r"an NVIDIA GPU of compute capability 9\.0 or more, got none"):
        GLU(implementation="pallas")(x, training=True)
    bad = (
        ({"hidden": 72}, "got 16 in float32, a width of 72, gelu"),
        ({"hidden": 64, "activation": "relu"}, "one of gelu, gelu_tanh, silu, got 16 in float32, a width of 64, relu"),
        ({"hidden": 64, "dtype": "float16"}, "got 16 in float16"),
    )
    for options, said in bad:
        layer = GLU(implementation="pallas", **options)
        with pytest.raises(ValueError, match=needs + "tokens in bfloat16 or float32, .* a multiple of 64, .*" + said):
            layer(x, training=True)
        with pytest.raises(ValueError, match=said):
            layer.check_training(2, 8)
    with pytest.raises(ValueError, match="got 0 in float32"):
        GLU(implementation="pallas")(x[:0], training=True)
    layer = GLU(hidden=64, implementation="pallas")
    layer.build(x.shape)
    layer.in_projection.quantize("int8")
    with pytest.raises(ValueError, match=needs + "a static shape and weights that are not quantized"):
        layer(x, training=True)
    with pytest.raises(ValueError, match="GLU: implementation must be one of auto, xla, pallas, got 'cuda'"):
        GLU(implementation="cuda")


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_auto_takes_it_where_it_was_measured_to_be_faster(backend, monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    of = lambda tokens, hidden=2048, name="gelu", dtype="bfloat16": fused.sizes((tokens, 2 * hidden), dtype, name)  # noqa: E731
    assert fused.is_faster(of(65_536)) == (backend == "tensorflow")
    others = [of(32_768), of(65_536 + 8), of(65_536, 1024), of(65_536, name="silu"), of(65_536, dtype="float32")]
    assert not any(map(fused.is_faster, others))


@pytest.mark.skipif((nvidia.capability() or (0, 0)) < nvidia.HOPPER, reason="needs an NVIDIA GPU from Hopper on")
@pytest.mark.parametrize("name", fused.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(8, 512, 2048), (3, 100, 320)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_it_is_as_exact_as_the_einsums(dtype, shape, name):
    if (found := fused.obstacle(fused.sizes((*shape[:-1], 2 * shape[-1]), dtype, name))) is not None:
        pytest.skip(f"the kernels need {found}")
    arrays = drawn(shape)
    want = oracle(**arrays, name=name)
    found, least = (errors(measured(arrays, name, dtype, gate), want) for gate in (fused.gated, einsums))
    assert all(found[key] < max(FLOAT32, BFLOAT16_FACTOR * least[key]) for key in found), (found, least)
