"""Text from a causal language model: how tokens are chosen, and the loops that choose them."""

from flash_tf.generation.beam import BeamSearch
from flash_tf.generation.decoding import decode, greedy
from flash_tf.generation.generator import Generator
from flash_tf.generation.samplers import GREEDY, Sampler

__all__ = ["GREEDY", "BeamSearch", "Generator", "Sampler", "decode", "greedy"]
