"""The options `implementation` and `norm_implementation` of what `kernels_pallas` has fused kernels for."""

from collections.abc import Callable
from types import ModuleType

import keras

from kernels_pallas.sizes import Sizes

IMPLEMENTATIONS = ("auto", "xla", "pallas")


def check_implementation(layer: keras.layers.Layer, option: str = "implementation") -> None:
    """Raises a ValueError unless the layer's `option` is one of `IMPLEMENTATIONS`."""
    if (given := getattr(layer, option)) not in IMPLEMENTATIONS:
        needed = f"{option} must be one of {', '.join(IMPLEMENTATIONS)}"
        raise ValueError(f"{type(layer).__name__}: {needed}, got {given!r}")


def runs_fused(
    layer: keras.layers.Layer, lead: tuple[int | None, ...], kernels: ModuleType, sizes: Callable[[], Sizes]
) -> bool:
    """Whether fused kernels compute a training step over tokens of the shape `lead`.

    Args:
      layer: Has `implementation` and `in_projection`.
      lead: None where a size is unknown.
      kernels: The module with `is_faster` and `obstacle`.
      sizes: Gives the kernels' sizes. It is called if all of `lead` is known.

    Raises:
      ValueError: `implementation` is "pallas", and they cannot run.
    """
    option, mode = f"{type(layer).__name__}: implementation", layer.in_projection.quantization_mode
    if layer.implementation != "xla" and (None in lead or mode):
        if layer.implementation == "pallas":
            raise ValueError(
                f"{option} 'pallas' needs a static shape and weights that are not quantized, got {lead} tokens, {mode}"
            )
        return False
    return takes_fused(option, layer.implementation, kernels, sizes)


def takes_fused(option: str, implementation: str, kernels: ModuleType, sizes: Callable[[], Sizes]) -> bool:
    """Whether fused kernels run, by the value `implementation` of an option.

    Args:
      option: For the error.
      implementation: One of `IMPLEMENTATIONS`.
      kernels: The module with `is_faster` and `obstacle`.
      sizes: Gives the kernels' sizes.

    Raises:
      ValueError: The value is "pallas", and they cannot run.
    """
    if implementation == "xla":
        return False
    m = sizes()
    if implementation == "auto" and not kernels.is_faster(m):
        return False
    found = kernels.obstacle(m)
    if implementation == "pallas" and found is not None:
        raise ValueError(f"{option} 'pallas' needs {found}")
    return found is None
