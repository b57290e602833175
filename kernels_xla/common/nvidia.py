"""What an NVIDIA GPU alone can run, and whether XLA compiles a program."""

import keras
from keras import ops

from kernels_xla.common.spec import Tensor

AMPERE, HOPPER = (8, 0), (9, 0)


def capability() -> tuple[int, int] | None:
    """The compute capability of the backend's first GPU; None without an NVIDIA one."""
    if keras.config.backend() == "jax":
        import jax

        found = [device for device in jax.devices() if device.device_kind.startswith("NVIDIA")]
        return tuple(map(int, found[0].compute_capability.split("."))) if found else None
    import tensorflow as tf

    gpus = tf.config.get_visible_devices("GPU")
    return tf.config.experimental.get_device_details(gpus[0]).get("compute_capability") if gpus else None


def is_deterministic() -> bool:
    """Whether TensorFlow's operators have to be deterministic."""
    from tensorflow.python.framework import config

    return config.is_op_determinism_enabled()


def whole_gradient(x: Tensor) -> Tensor:
    """The same tensor. In TensorFlow on an NVIDIA GPU, XLA writes its gradient to memory before anything reads it.

    It is for the result of a projection. Its gradient is read three times: by two products and by the bias's sums. If
    parts of it come from elsewhere, XLA would join them in each reader, and choose a slower product that can.
    """
    if keras.config.backend() == "jax" or capability() is None or not xla_compiles():
        return x
    return ops.custom_gradient(lambda x: (x, _written))(x)


def _written(x):
    """The same tensor, behind a barrier, to which TensorFlow has no gradient."""
    from tensorflow.compiler.tf2xla.python import xla

    return ops.custom_gradient(lambda x: (xla.optimization_barrier(x)[0], lambda dx: dx))(x)


def xla_compiles() -> bool:
    """Whether XLA compiles what is traced now: always with JAX, in TensorFlow if the function says so."""
    if keras.config.backend() == "jax":
        return True
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def call(program: str | bytes, operands: list[Tensor], results: list[tuple[tuple[int, ...], str]]) -> list[Tensor]:
    """Runs a StableHLO program in TensorFlow, on an NVIDIA GPU.

    Args:
      program: The program, as text or serialized.
      operands: Its inputs, of static shapes.
      results: Shape and dtype of each output.

    Returns:
      The outputs.
    """
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    shapes, dtypes = zip(*results, strict=True)
    # 10 is the calling convention: one platform, so no argument that says which.
    options = {"version": 10, "platforms": ["CUDA"], "function_list": []}
    types = [tf.dtypes.as_dtype(dtype) for dtype in dtypes]
    return xla.call_module(operands, module=program, Sout=shapes, Tout=types, **options)
