"""The limit of a text's length, also where it is known only when a program runs."""

from keras import ops

from kernels_xla.common.accelerator import on_lite
from kernels_xla.common.spec import Tensor


def at_most(x: Tensor, most: int | None, needs: str) -> Tensor:
    """`x` `[b, n, ...]` of at most so many tokens.

    TensorFlow may trace a program without knowing n. The program then raises an InvalidArgumentError when it runs. XLA
    drops that check, so a longer `x` of floats becomes NaN there.

    Args:
      x: A tensor.
      most: The most tokens; None for any number.
      needs: What the message says before the two numbers.

    Raises:
      ValueError: n is known, and more than `most`.
    """
    n = x.shape[1]
    if most is None or (n is not None and n <= most):
        return x
    if n is not None:
        raise ValueError(f"{needs}={most} tokens, got {n}")
    if not on_lite():  # which has no such check
        import tensorflow as tf

        fits = tf.debugging.Assert(tf.shape(x)[1] <= most, [f"{needs}={most} tokens, got", tf.shape(x)[1]])
        with tf.control_dependencies([fits]):
            x = tf.identity(x)
    return ops.where(ops.shape(x)[1] <= most, x, float("nan")) if "float" in x.dtype.name else x
