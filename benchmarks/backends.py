"""One name for what TensorFlow and JAX do differently: compiling, gradients, waiting for the device, its name."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from benchmarks import device

Tensors = dict[str, Any]


def on_jax() -> bool:
    """Whether Keras runs on JAX, not on TensorFlow.

    Raises:
      ValueError: The backend is neither.
    """
    if keras.backend.backend() not in ("jax", "tensorflow"):
        raise ValueError(f"KERAS_BACKEND must be tensorflow or jax, got {keras.backend.backend()}")
    return keras.backend.backend() == "jax"


def device_name() -> str:
    """The device on which the backend runs."""
    if on_jax():
        import jax

        found = jax.devices()[0]
        return device.cpu() if found.platform == "cpu" else found.device_kind
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(gpus[0])["device_name"] if gpus else device.cpu()


def compiled(function: Callable) -> Callable:
    """`function` of tensors, compiled whole by XLA."""
    if on_jax():
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=True, autograph=False)


def with_gradients(function: Callable[..., Any]) -> Callable:
    """From `function(**arguments)`, one tensor, to `(arguments, cotangent) -> (out, gradients)`.

    The gradients are by name, for real-valued arguments. The cotangent is the gradient of a loss by `out`.
    """
    differentiate = _jax_gradients if on_jax() else _tensorflow_gradients

    def value_and_gradients(arguments: Tensors, cotangent):
        real = {name: x for name, x in arguments.items() if keras.backend.is_float_dtype(x.dtype)}
        rest = {name: x for name, x in arguments.items() if name not in real}
        return differentiate(lambda real: function(**real, **rest), real, cotangent)

    return value_and_gradients


def _jax_gradients(function, real, cotangent):
    import jax

    out, pull_back = jax.vjp(function, real)
    return out, pull_back(cotangent)[0]


def _tensorflow_gradients(function, real, cotangent):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(real)
        out = function(real)
    gradients = tape.gradient(out, real, cotangent, unconnected_gradients="zero")
    # An input that only a gather reads has an IndexedSlices in eager mode.
    return out, {name: tf.convert_to_tensor(x) for name, x in gradients.items()}


def wait(result: Any) -> None:
    """Returns when the device has computed `result`."""
    if on_jax():
        import jax

        jax.block_until_ready(result)
    else:
        import tensorflow as tf

        tf.test.experimental.sync_devices()


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device had too little memory."""
    text = str(error).lower()  # types and wordings differ between backends
    return type(error).__name__ == "ResourceExhaustedError" or "resource_exhausted" in text or "out of memory" in text


def full_precision() -> None:
    """Makes a GPU multiply float32 in full precision from now on, not in TensorFloat-32."""
    if on_jax():
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")
    else:
        import tensorflow as tf

        tf.config.experimental.enable_tensor_float_32_execution(False)


def tensor(x, dtype: str | None = None):
    """A NumPy array as a tensor of the backend. `dtype`, if given, applies to real-valued arrays."""
    return ops.convert_to_tensor(x, dtype=dtype if x.dtype.kind == "f" else str(x.dtype))
