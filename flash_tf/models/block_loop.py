"""Blocks that are alike as one loop, so that neither the program nor the time to compile it grows with the depth."""

from collections.abc import Callable, Sequence

import keras
from keras import ops

from kernels_xla.common.sharding import gathered
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
    if loop and keras.backend.backend() == "jax":
        return _loop([blocks[i : i + period] for i in range(0, len(blocks), period)], x, call)
    for block in blocks:
        x = call(block, x)
    return x


def _loop(passes, x, call):
    variables = [[v for block in one for v in block.variables] for one in passes]
    weights = {id(v) for block in passes[0] for v in block.weights}
    seeds = [i for i, v in enumerate(variables[0]) if id(v) not in weights]  # of dropout, which moves them on
    stacked = [ops.stack([v.value for v in alike]) for alike in zip(*variables, strict=True)]

    dtype = passes[0][0].compute_dtype

    def one_pass(x, values):
        # Gathered here, in the dtype of its products: the backward pass keeps the part, and gathers it again.
        casts = [v._autocast and len(v.shape) > 1 for v in variables[0]]
        values = [gathered(ops.cast(w, dtype) if cast else w) for w, cast in zip(values, casts, strict=True)]
        mapping = list(zip(variables[0], values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, initialize_variables=False):
            for block in passes[0]:
                x = call(block, x)
            return x, [variables[0][i].value for i in seeds]

    x, moved = ops.scan(keras.remat(one_pass), x, stacked)
    for i, values in zip(seeds, moved, strict=True):
        for own, value in zip(variables, values, strict=True):
            own[i].assign(value)
    return x
