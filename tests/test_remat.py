"""Blocks computed again: their gradients come all at once, so that no weight changes while others still need it."""

import numpy as np
import pytest

from flash_tf.layers import GLU, ResidualBlock
from tests import numerics


@pytest.mark.one_backend
def test_no_gradient_of_a_block_is_there_before_all_are():
    import tensorflow as tf

    block = ResidualBlock(GLU(hidden=24), remat=True)
    block.build((2, 8, 16))
    weights = [weight.value for weight in block.trainable_variables]

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(block(x, training=True) ** 2)
        return tape.gradient(loss, weights)

    graph = gradients.get_concrete_function(tf.constant(np.ones((2, 8, 16), "float32"))).graph
    before = [{op.name for op in _before(found.op) if "MatMul" in op.type} for found in graph.structured_outputs]
    assert len(before) == len(weights) and before[0]
    assert all(products == before[0] for products in before)


@pytest.mark.one_backend
def test_weights_that_a_stateless_scope_gives_have_the_gradients_of_a_block_that_keeps_its_activations():
    import keras
    import tensorflow as tf

    inner = GLU(hidden=24)
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 8, 16)).astype("float32"))
    found = []
    for remat in (True, False):
        block = ResidualBlock(inner, remat=remat)
        block.build(x.shape)
        values = [tf.identity(v.value) + 0.1 for v in block.variables]
        with tf.GradientTape() as tape, keras.StatelessScope(list(zip(block.variables, values, strict=True))):
            tape.watch([x, *values])
            loss = tf.reduce_sum(block(x, training=True) ** 2)
        found.append(tape.gradient(loss, [x, *values]))
    assert len(found[0]) > 2
    for one, other in zip(*found, strict=True):
        assert numerics.relative_error(one, other) < numerics.FLOAT32


def _before(op):
    """Operations that must have ended before `op` ends, itself included."""
    seen, waiting = {op}, [op]
    while waiting:
        one = waiting.pop()
        for other in (*(tensor.op for tensor in one.inputs), *one.control_inputs):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen
