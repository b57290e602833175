"""How `CausalLM.generate` and `CausalLM.stream` choose the next token."""

from flash_tf import backend  # noqa: F401
from flash_tf.generation.beam import BeamSearch
from flash_tf.generation.samplers import GREEDY, Sampler

__all__ = ["GREEDY", "BeamSearch", "Sampler"]


def __dir__() -> list[str]:
    return __all__
