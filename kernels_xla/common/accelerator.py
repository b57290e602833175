"""The accelerator that a program is traced for: a TPU and a GPU run different forms of some functions."""

import contextlib
from collections.abc import Iterator

import keras

from kernels_xla.common import nvidia

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


def traced_elsewhere() -> bool:
    """Whether the traced program runs on another machine, so that it takes no kernel of this one alone."""
    return bool(_chosen)


def on_lite() -> bool:
    """Whether the traced program runs in TensorFlow Lite."""
    return bool(_chosen) and _chosen[-1] == "lite"


def fuses_attention(shape: tuple[int | None, ...], dtype) -> bool:
    """Whether softmax attention runs as one kernel here: cuDNN's, from Ampere GPUs on, in 16 bits.

    `keras.config.disable_flash_attention()` turns it off. A program that is traced for another machine is without it.

    Args:
      shape: `[b, n, h, s]` of queries, keys and values. The kernel takes an s that is a multiple of 8 up to 128, and
        TensorFlow needs all sizes to be static.
      dtype: Their dtype.
    """
    width, half = shape[-1], keras.backend.standardize_dtype(dtype) in ("bfloat16", "float16")
    if _chosen or None in shape or width % 8 or width > 128 or not half:
        return False
    if keras.config.is_flash_attention_enabled() is False:
        return False
    return (nvidia.capability() or (0, 0)) >= nvidia.AMPERE
