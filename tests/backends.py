"""What Keras has one name for on no two backends: a gradient and a compiled function."""

import functools
import random

import keras
import numpy as np
from keras import ops

from tests.numerics import SIZES, at, real_tokens


def seed(number):
    """Keras' initializers and dropouts draw the same again; `tf.data`, and so `fit`, does not.

    `keras.utils.set_random_seed` makes TensorFlow drop its kernels too, and making them again is a sixth of a test.
    """
    random.seed(number)


def tensors(arrays, dtype):
    """NumPy arrays as tensors of the backend, the real-valued ones in `dtype`."""
    return {
        name: ops.convert_to_tensor(x, dtype=dtype if x.dtype.kind == "f" else str(x.dtype))
        for name, x in arrays.items()
    }


def to_numpy(x):
    """A tensor as NumPy, in float64 if real-valued: NumPy's own arithmetic knows no bfloat16."""
    real = keras.backend.is_float_dtype(x.dtype)
    return ops.convert_to_numpy(ops.cast(x, "float64") if real else x)


def compiled(function):
    """`function` of tensors, compiled whole by XLA."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, autograph=False, jit_compile=True)  # AutoGraph takes as long as XLA itself


def on_jax_compiled(function):
    """`function` of tensors, on JAX compiled unless it is: operation by operation it would compile each one."""
    if keras.backend.backend() != "jax":
        return function
    import jax

    return function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)


@functools.cache
def once(function, **case):
    """`function` under options; on JAX compiled once for all tests, so that a patch of what it calls has no effect."""
    return on_jax_compiled(functools.partial(function, **case))


def value_and_gradients(function, arguments, cotangent):
    """The value of `function(**arguments)`, and its gradient for every real-valued argument.

    Args:
      function: From tensors to one tensor.
      arguments: Name -> tensor.
      cotangent: Shape -> NumPy array, the gradient of a loss with respect to the value.

    Returns:
      The value, and a dictionary name -> gradient.
    """
    real = {name: x for name, x in arguments.items() if keras.backend.is_float_dtype(x.dtype)}
    rest = {name: x for name, x in arguments.items() if name not in real}
    differentiate = _with_jax if keras.backend.backend() == "jax" else _with_tensorflow
    function = on_jax_compiled(function)
    return differentiate(lambda real: function(**real, **rest), real, cotangent)


def _under(case, function):
    return functools.partial(function, **case) if case else function


def call(function, case, arrays, masked=None, dtype="float32"):
    """The output, as NumPy."""
    function = on_jax_compiled(_under(case, function))
    return to_numpy(function(**tensors(arrays, dtype), **tensors(masked or {}, dtype)))


def differentiate(function, case, arrays, masked=None, dtype="float32"):
    """`{"out": value, "d<name>": gradient}` as NumPy, under a random cotangent at the real tokens.

    Random, because under a plain sum errors of opposite sign cancel.
    """
    masked = masked or {}
    b, n = next(iter(arrays.values())).shape[:2]
    real = real_tokens(masked, b, n)
    out, gradients = value_and_gradients(
        _under(case, function),
        {**tensors(arrays, dtype), **tensors(masked, dtype)},
        lambda shape: at(real, np.random.default_rng(1).normal(size=shape)),
    )
    assert keras.backend.standardize_dtype(out.dtype) == dtype
    return {"out": at(real, to_numpy(out)), **{f"d{name}": to_numpy(x) for name, x in gradients.items()}}


def start(spec, case, b, n, dtype="float32"):
    """The state of a stream of `b` rows before the first token, with room for `n`."""
    return spec.stream.initial_state({**SIZES, "b": b, "n": n}, case, dtype)


def extend(function, state, arrays, valid=None, dtype="float32"):
    """One step of a stream by its `function`: the outputs as NumPy, and the next state."""
    if valid is not None:
        valid = ops.convert_to_tensor(valid, dtype="int32")
    out, state = function(state, valid=valid, **tensors(arrays, dtype))
    return to_numpy(out), state


def _with_jax(function, real, cotangent):
    import jax

    out, pull_back = jax.vjp(function, real)
    return out, pull_back(ops.cast(cotangent(out.shape), out.dtype))[0]


def _with_tensorflow(function, real, cotangent):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(real)
        out = function(real)
    output_gradients = ops.cast(cotangent(tuple(out.shape)), out.dtype)
    return out, tape.gradient(out, real, output_gradients, unconnected_gradients="zero")
