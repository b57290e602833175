"""In TensorFlow on a GPU the gradient of a projection is written once, behind a barrier. The function is the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from flash_tf.layers import GLU, MLP, MultiHeadSelfAttention
from kernels_xla.common import nvidia
from tests.numerics import FLOAT32, errors

pytestmark = pytest.mark.one_backend
LAYERS = {
    "glu": lambda: GLU(hidden=8),
    "mlp": lambda: MLP(hidden=8),
    "self_attention": lambda: MultiHeadSelfAttention(heads=2),
}


def drawn():
    return tf.constant(np.random.default_rng(0).normal(size=(2, 4, 8)), "float32")


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(nvidia, "capability", lambda: (9, 0))
    keras.config.disable_flash_attention()  # which this machine cannot run
    yield
    keras.config.enable_flash_attention()


def step(layer, x, compiled):
    """The gradients of a training step, of the input and of each weight, as a function of the input."""

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = layer(x, training=True)
        return tape.gradient(out, [x, *layer.trainable_variables])

    return tf.function(run, jit_compile=compiled, autograph=False)


def barriers(layer, x):
    return step(layer, x, compiled=True).experimental_get_compiler_ir(x)(stage="hlo").count("opt-barrier(")


@pytest.mark.parametrize("kind", LAYERS)
def test_only_there_a_barrier_is_behind_the_projection(kind, on_a_gpu, monkeypatch):
    layer, x = LAYERS[kind](), drawn()
    layer.build(x.shape)
    assert barriers(layer, x) == 1
    monkeypatch.setattr(nvidia, "capability", lambda: None)
    assert barriers(layer, x) == 0


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_layer_trains_as_without(kind, compiled, on_a_gpu, monkeypatch):
    layer, x = LAYERS[kind](), drawn()
    found = step(layer, x, compiled)(x)
    monkeypatch.setattr(nvidia, "capability", lambda: None)
    want = step(layer, x, compiled)(x)
    assert max(errors(*({str(i): g.numpy() for i, g in enumerate(of)} for of in (found, want))).values()) < FLOAT32


def test_a_tape_around_a_compiled_layer_gets_its_gradient(on_a_gpu):
    """TensorFlow compiles the backward pass of such a function too, so that it can have a barrier."""
    layer, x, gradients = LAYERS["glu"](), drawn(), []
    for compiled in (True, False):
        run = tf.function(lambda x: layer(x, training=True), jit_compile=compiled)
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = run(x)
        gradients.append({"x": tape.gradient(out, x).numpy()})
    assert errors(*gradients)["x"] < FLOAT32


@pytest.mark.parametrize("compiled", [True, False])
def test_what_xla_does_not_compile_is_without(compiled, on_a_gpu):
    layer, x = LAYERS["glu"](), drawn()
    types = {op.type for op in step(layer, x, compiled).get_concrete_function(x).graph.get_operations()}
    assert ({"XlaOptimizationBarrier", "IdentityN"} & types != set()) == compiled


def test_it_has_second_gradients(on_a_gpu):
    @tf.function(jit_compile=True)
    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = nvidia.whole_gradient(x**3) ** 2
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    x = drawn()
    assert errors({"x": second(x).numpy()}, {"x": 30 * x.numpy() ** 4})["x"] < FLOAT32
