"""Blocks that are alike as one loop, so that neither the program nor the time to compile it grows with the depth."""

import functools
from collections.abc import Callable, Sequence

import keras
from keras import ops

from flash_tf.layers.traced_once import TracedOnce
from kernels_xla.common.sharding import gather_of_weights
from kernels_xla.common.spec import Tensor


def through(
    blocks: Sequence[keras.layers.Layer],
    period: int,
    x: Tensor,
    call: Callable[[keras.layers.Layer, Tensor], Tensor],
    loop: bool,
) -> Tensor:
    """`x` through blocks, one after the other.

    Args:
      blocks: The blocks in order, built. Each is like the one `period` before it.
      period: Number of blocks of one pass of a loop. It divides their number.
      x: The input of the first block.
      call: `(block, x) -> y` of the shape and the dtype of `x`.
      loop: Whether the blocks are one loop on JAX, with the same numbers. The weights of all passes are stacked, and
        the backward pass keeps what `call` keeps. On TensorFlow, XLA takes no gradient of such a loop.
    """
    passes = [blocks[i : i + period] for i in range(0, len(blocks), period)]
    if loop and keras.backend.backend() == "jax":
        return _loop(passes, x, call)
    one_pass = TracedOnce(lambda blocks, x: functools.reduce(lambda x, block: call(block, x), blocks, x), passes)
    for blocks in passes:
        x = one_pass(blocks, x)
    return x


def _loop(passes, x, call):
    variables = [[v for block in one for v in block.variables] for one in passes]
    weights = {id(v) for block in passes[0] for v in block.weights}
    seeds = [i for i, v in enumerate(variables[0]) if id(v) not in weights]  # of dropout, which moves them on
    stacked = [ops.stack([v.value for v in alike]) for alike in zip(*variables, strict=True)]

    def one_pass(x, values):
        mapping = list(zip(variables[0], values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, initialize_variables=False):
            for block in passes[0]:
                x = call(block, x)
            return x, [variables[0][i].value for i in seeds]

    if (gather := gather_of_weights()) is not None:
        one_pass = _gathering(one_pass, gather, variables[0], passes[0])
    x, moved = ops.scan(one_pass, x, stacked)
    for i, values in zip(seeds, moved, strict=True):
        for own, value in zip(variables, values, strict=True):
            own[i].assign(value)
    return x


def _gathering(one_pass, gather, variables, blocks):
    """`one_pass` from weights in parts. The backward pass keeps the parts, and gathers them again."""
    dtypes = _dtypes(blocks)  # fewer bytes than the weights' own

    @keras.remat
    def call(x, values):
        read = [ops.cast(w, dtypes.get(id(v), w.dtype)) for v, w in zip(variables, values, strict=True)]
        return one_pass(x, [gather(w) for w in read])

    return call


def _dtypes(blocks):
    """The dtype in which a layer reads its matrices, by the variable's id."""
    layers = [layer for block in blocks for layer in block._flatten_layers()]
    return {
        id(v): layer.compute_dtype
        for layer in layers
        for v in layer._trainable_variables
        if v._autocast and len(v.shape) > 1
    }
