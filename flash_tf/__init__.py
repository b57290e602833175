"""FLASH, GAU and the Transformers they are measured against, as Keras layers and models.

    import flash_tf as ft

    ft.layers    # Keras layers: every mixer, and the parts around them
    ft.models    # CausalLM, MaskedLM, Classifier, Matcher
    ft.load      # a trained model with its weights and its tokenizer
    ft.samplers  # how `model.generate` and `model.stream` choose the next token

Each is imported when it is first used. They run on the backend that KERAS_BACKEND names.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_tf import layers, models, samplers
    from flash_tf.loading import load

__version__ = "0.1.0"
__all__ = ["__version__", "layers", "load", "models", "samplers"]


def __getattr__(name: str) -> Any:
    if name == "load":
        return importlib.import_module("flash_tf.loading").load
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
