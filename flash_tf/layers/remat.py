"""Rematerialization: activations are recomputed in the backward pass instead of kept."""

import contextlib
from collections.abc import Callable

import keras
from keras.src.backend.common import global_state


def remat(function: Callable) -> Callable:
    """`function(x)` without kept intermediate results: the gradient computes them again.

    A compiler that sees that both computations are the same merges them and saves nothing. TensorFlow's own
    `recompute_grad` adds a zero, made from the output's gradient, to the second input, but XLA:TPU recognizes that
    zero. So this backward pass adds a zero that no compiler can recognize. It also returns all gradients together.
    Outside XLA, a weight that is updated as soon as its own gradient exists may change while the other gradients are
    computed. That happened about once in 50 programs (TensorFlow 2.20, with its own `recompute_grad` too).

    Args:
      function: `x -> y` on tensors. It may call layers and close over other tensors.
    """
    if keras.backend.backend() != "tensorflow":
        return keras.remat(function)
    import tensorflow as tf

    forward, scope = keras.remat(function), global_state.get_global_attribute("stateless_scope")
    values = {} if scope is None else {k: v for k, v in scope.state_mapping.items() if v.dtype.is_floating}

    @tf.custom_gradient
    def run(x, *weights):
        def backward(gradient, variables=()):
            with tf.GradientTape(watch_accessed_variables=False) as tape, _with(scope, values, weights):
                again = x + tf.cast(_zero_after(gradient), x.dtype)
                tape.watch([again, *weights, *variables])
                y = function(again)
            sources = [again, *weights, *variables]
            found = tape.gradient(y, sources, gradient)
            given = range(1, 1 + len(weights))  # a scope may hold a whole model, and zeros for all would be as large
            found = [
                tf.zeros_like(x) if one is None and i not in given else one
                for i, (x, one) in enumerate(zip(sources, found, strict=True))
            ]
            known = [one for one in tf.nest.flatten(found, expand_composites=True) if one is not None]
            with tf.control_dependencies(known):
                found = [one if one is None else tf.identity(one) for one in found]
            return found[: 1 + len(weights)], found[1 + len(weights) :]

        return forward(x), backward

    def _zero_after(gradient):
        return tf.minimum(tf.abs(tf.reshape(gradient, [-1])[0]), 0)

    return lambda x: run(x, *values.values())


def _with(scope, values, weights):
    """A `keras.StatelessScope` like `scope`, but with these weights in place of `values`."""
    if scope is None:
        return contextlib.nullcontext()
    like = keras.StatelessScope(initialize_variables=False)
    like.state_mapping = {**scope.state_mapping, **dict(zip(values, weights, strict=True))}
    return like


def check_recomputed(layer: keras.layers.Layer) -> None:
    """Raises a ValueError if the layer drops numbers: a second pass would draw others."""
    for one in layer._flatten_layers():
        if isinstance(one, keras.layers.Dropout) and one.rate:
            name = type(layer).__name__
            raise ValueError(f"{name} needs {one.name} 0 to be recomputed in the backward pass, got {one.rate}")


class Recomputed:
    """A base of layers, before `keras.layers.Layer`: `keras.RematScope` recomputes such a layer as a whole.

    Keras' own form fails in a TensorFlow graph, which takes no keywords there, and for dropout on JAX.
    """

    def rematerialized_call(self, layer_call: Callable, *args, **kwargs) -> Callable:
        """What Keras calls in place of `layer_call` under a `keras.RematScope`, whose mode may leave it as it is."""
        if super().rematerialized_call(layer_call, *args, **kwargs) is layer_call:
            return layer_call
        for layer in self._flatten_layers(include_self=False):
            layer._remat_mode = None
        return self.recomputed(layer_call)

    def recomputed(self, call: Callable) -> Callable:
        """`call(x, ...)`, recomputed in the backward pass."""
        check_recomputed(self)
        return lambda x, *args, **kwargs: remat(lambda x: call(x, *args, **kwargs))(x)
