"""What a program is traced for, where a TPU and a GPU each want their own form of the same function."""

import contextlib
from collections.abc import Iterator

import keras

_chosen: list[str] = []


@contextlib.contextmanager
def tracing_for(accelerator: str) -> Iterator[None]:
    """What is traced inside is for "tpu" or "gpu", whatever this machine has, as when it compiles ahead for a TPU.

    "lite" is TensorFlow Lite, which has fewer operators. All forms run everywhere and give the same numbers.
    """
    if accelerator not in ("tpu", "gpu", "lite"):
        raise ValueError(f"tracing_for takes 'tpu', 'gpu' or 'lite', got {accelerator!r}")
    _chosen.append(accelerator)
    try:
        yield
    finally:
        _chosen.pop()


def on_tpu() -> bool:
    """Whether a TPU is to run what is being traced: as the innermost `tracing_for` says, else if there is one."""
    return _chosen[-1] == "tpu" if _chosen else any("tpu" in name for name in keras.distribution.list_devices())


def on_lite() -> bool:
    """Whether TensorFlow Lite is to run what is being traced."""
    return bool(_chosen) and _chosen[-1] == "lite"


def fuses_attention(width: int, dtype) -> bool:
    """Whether Keras has softmax attention in one kernel here, cuDNN's: on JAX, on a GPU from Ampere on, of 16 bits.

    TensorFlow has no such operator.

    Args:
      width: Of a head; the kernel takes multiples of 8 up to 128.
      dtype: Of queries, keys and values.
    """
    takes = width % 8 == 0 and width <= 128 and keras.backend.standardize_dtype(dtype) in ("bfloat16", "float16")
    if keras.config.backend() != "jax" or not takes:
        return False
    return any(name.startswith(("gpu", "cuda")) for name in keras.distribution.list_devices())
