"""On a GPU the gradient of a projection's result is one tensor in memory. The function stays as it is."""

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import GLU, MLP, MultiHeadSelfAttention
from kernels_xla.common import nvidia
from tests import backends
from tests.fused import step
from tests.numerics import FLOAT32, errors

LAYERS = {
    "glu": lambda: GLU(hidden=8),
    "mlp": lambda: MLP(hidden=8),
    "self_attention": lambda: MultiHeadSelfAttention(heads=2),
}


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(nvidia, "capability", lambda: (9, 0))
    keras.config.disable_flash_attention()  # which this machine cannot run
    yield
    keras.config.enable_flash_attention()


def program(layer, x):
    """XLA's input of a training step of the layer."""

    def run(x, *weights):
        def loss(x, *weights):
            out = layer.stateless_call(list(weights), [], x, training=True)[0]
            return ops.sum(ops.cast(out, "float32"))

        if keras.config.backend() == "jax":
            import jax

            return jax.grad(loss, argnums=tuple(range(1 + len(weights))))(x, *weights)
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch([x, *weights])
            value = loss(x, *weights)
        return tape.gradient(value, [x, *weights])

    given = [x, *(weight.value for weight in layer.trainable_variables)]
    if keras.config.backend() == "jax":
        return backends.compiled(run).lower(*given).as_text()
    import tensorflow as tf

    return backends.compiled(run).experimental_get_compiler_ir(*map(tf.convert_to_tensor, given))(stage="hlo")


def barriers(layer, x):
    text = program(layer, x)
    return text.count("opt-barrier(") + text.count("stablehlo.optimization_barrier")


@pytest.mark.parametrize("kind", LAYERS)
def test_only_there_a_barrier_is_behind_the_projection(kind, on_a_gpu, monkeypatch):
    layer, x = LAYERS[kind](), ops.ones((2, 4, 8))
    layer.build(x.shape)
    assert barriers(layer, x) == 1
    monkeypatch.setattr(nvidia, "capability", lambda: None)
    assert barriers(layer, x) == 0


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_layer_trains_as_without(kind, compiled, on_a_gpu, monkeypatch):
    layer = LAYERS[kind]()
    layer.build((None, None, 8))
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(2, 4, 8)), "float32")
    found = step(layer, x, compiled=compiled)
    monkeypatch.setattr(nvidia, "capability", lambda: None)
    assert max(errors(found, step(layer, x, compiled=compiled)).values()) < FLOAT32


@pytest.mark.one_backend
def test_a_tape_around_a_compiled_layer_gets_its_gradient(on_a_gpu):
    """TensorFlow compiles the backward pass of such a function too, so that it can have a barrier."""
    import tensorflow as tf

    layer, x = LAYERS["glu"](), tf.ones((2, 4, 8))
    layer.build(x.shape)
    gradients = []
    for compiled in (True, False):
        run = tf.function(lambda x: layer(x, training=True), jit_compile=compiled)
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = run(x)
        gradients.append(backends.to_numpy(tape.gradient(out, x)))
    assert errors({"x": gradients[0]}, {"x": gradients[1]})["x"] < FLOAT32


@pytest.mark.one_backend
@pytest.mark.parametrize("compiled", [True, False])
def test_what_xla_does_not_compile_is_without(compiled, on_a_gpu):
    import tensorflow as tf

    layer, x = LAYERS["glu"](), tf.ones((2, 4, 8))
    layer.build(x.shape)

    @tf.function(jit_compile=compiled)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = layer(x, training=True)
        return tape.gradient(out, x)

    types = {op.type for op in run.get_concrete_function(x).graph.get_operations()}
    assert ({"XlaOptimizationBarrier", "IdentityN"} & types != set()) == compiled
