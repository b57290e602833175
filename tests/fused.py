"""Fused kernels without a GPU, and a layer's training step."""

import functools

import jax
import keras
import numpy as np
from keras import ops

from kernels_pallas import launching
from tests import backends


@functools.cache
def program(name, m):
    """A kernel by Pallas' interpreter, compiled once for all tests; see `conftest.patched_kernels`."""
    return jax.jit(functools.partial(launching.launch, name, m, interpret=True))


def interpreted(name, m, *tensors):
    """`programs.run` by Pallas' interpreter, on either backend."""
    if keras.config.backend() == "jax":
        return program(name, m)(*tensors)
    return [ops.convert_to_tensor(np.asarray(x)) for x in program(name, m)(*map(np.asarray, tensors))]


def by_implementation(layer, x_shape, **options):
    """A layer with fused kernels and without, with the same weights, by its `implementation`."""
    backends.seed(0)
    made = {value: layer(implementation=value, name="mixer", **options) for value in ("xla", "pallas")}
    for one in made.values():
        one.build(x_shape)
        one.set_weights(made["xla"].get_weights())
    return made


def step(layer, x, masked=None, compiled=False):
    """The output of a training step, and the gradients of the input and of each weight, by name."""
    weights = {f"w{i}": weight.value for i, weight in enumerate(layer.trainable_variables)}

    def run(x, **given):
        return layer.stateless_call([given[name] for name in weights], [], x, training=True, **(masked or {}))[0]

    cotangent = lambda shape: np.random.default_rng(1).normal(size=shape)  # noqa: E731
    run = backends.compiled(run) if compiled else run
    out, gradients = backends.value_and_gradients(run, {"x": x, **weights}, cotangent)
    return {name: backends.to_numpy(found) for name, found in {"out": out, **gradients}.items()}
