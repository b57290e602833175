"""Activations computed again in the backward pass instead of kept."""

from collections.abc import Callable

import keras


def remat(function: Callable) -> Callable:
    """`function(x)`, of whose intermediate results none is kept: its gradient computes them again.

    Nothing is saved where a compiler sees that both computations are the same, and merges them. TensorFlow's own
    `recompute_grad` adds a zero to the second's input that is made of the output's gradient, and that XLA's compiler
    for TPUs knows to be one. So the backward pass here is ours, with a zero that no compiler knows. And it gives its
    gradients all at once: outside XLA a weight that is updated as soon as its own is there was seen, once in some 50
    programs, to change under the computation of the others (TensorFlow 2.20, with its own `recompute_grad` too).

    Args:
      function: `x -> y`, tensors, of layers and of what else it closes over.
    """
    if keras.backend.backend() != "tensorflow":
        return keras.remat(function)
    import tensorflow as tf

    forward = keras.remat(function)

    @tf.custom_gradient
    def run(x):
        def backward(gradient, variables=()):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                again = x + tf.cast(_zero_after(gradient), x.dtype)
                tape.watch([again, *variables])
                y = function(again)
            found = tape.gradient(y, [again, *variables], gradient, unconnected_gradients="zero")
            with tf.control_dependencies(tf.nest.flatten(found, expand_composites=True)):
                found = [tf.identity(one) for one in found]
            return found[0], found[1:]

        return forward(x), backward

    def _zero_after(gradient):
        return tf.minimum(tf.abs(tf.reshape(gradient, [-1])[0]), 0)

    return run
