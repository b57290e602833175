"""The accelerator that a program is traced for: a TPU and a GPU run different forms of some functions."""

import contextlib
from collections.abc import Iterator

import keras

_chosen: list[str] = []


@contextlib.contextmanager
def tracing_for(accelerator: str) -> Iterator[None]:
    """Traces the code inside for "tpu" or "gpu", whatever this machine has.

    A program can then be compiled for a TPU on another machine.

    "lite" means TensorFlow Lite, which has fewer operators. All forms run everywhere and give the same numbers.

    Raises:
      ValueError: `accelerator` is unknown.
    """
    if accelerator not in ("tpu", "gpu", "lite"):
        raise ValueError(f"tracing_for takes 'tpu', 'gpu' or 'lite', got {accelerator!r}")
    _chosen.append(accelerator)
    try:
        yield
    finally:
        _chosen.pop()


def on_tpu() -> bool:
    """Whether the traced program runs on a TPU: the innermost `tracing_for` decides, else whether a TPU is there."""
    return _chosen[-1] == "tpu" if _chosen else any("tpu" in name for name in keras.distribution.list_devices())


def on_lite() -> bool:
    """Whether the traced program runs in TensorFlow Lite."""
    return bool(_chosen) and _chosen[-1] == "lite"


def fuses_attention(width: int, dtype) -> bool:
    """Whether Keras runs softmax attention as one kernel here: cuDNN's, on JAX, from Ampere GPUs on, in 16 bits.

    TensorFlow has no such operator.

    Args:
      width: Width of a head. The kernel takes multiples of 8 up to 128.
      dtype: Dtype of queries, keys and values.
    """
    takes = width % 8 == 0 and width <= 128 and keras.backend.standardize_dtype(dtype) in ("bfloat16", "float16")
    if keras.config.backend() != "jax" or not takes:
        return False
    return any(name.startswith(("gpu", "cuda")) for name in keras.distribution.list_devices())
