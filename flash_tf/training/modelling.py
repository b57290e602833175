"""Makes a config's model, and derives the figures of a step. Needs no TensorFlow if Keras runs on JAX."""

import dataclasses
import inspect
from collections.abc import Callable
from operator import methodcaller

import keras

from flash_tf.config import Config, MaskingConfig
from flash_tf.layers.mixers import MIXERS
from flash_tf.models import MODELS
from flash_tf.registry import listed


def with_masking(config: Config) -> Config:
    """The config with its masking written out if the model is masked.

    Raises:
      ValueError: The options of model, data and masking do not fit together.
    """
    MODELS.check({**config.model, **model_extras(config)})
    n, length = config.data.sequence_length, config.model.get("max_length")
    if length is not None and length < n:
        raise ValueError(f"model.max_length ({length}) must be at least data.sequence_length ({n})")
    _check_mixers(config)
    masked = config.model["type"] == "masked_lm"
    if masked and config.masking is None:
        config = dataclasses.replace(config, masking=MaskingConfig())
    if masked and round(config.masking.rate * n) < 1:
        raise ValueError(f"masking.rate ({config.masking.rate}) of data.sequence_length ({n}) must be a token or more")
    if config.masking is not None and not masked:
        raise ValueError(f"masking belongs to masked_lm and to no other model, got it with {config.model['type']}")
    return config


def _check_mixers(config):
    """Raises a ValueError if a mixer cannot read the windows of the data."""
    n = config.data.sequence_length
    for mixer in listed(config.model["mixer"]):
        MIXERS.check(mixer)
        cls = MIXERS.get(mixer["type"])
        if mixer.get("chunk_size", 0) > n:
            raise ValueError(f"a mixer's chunk_size ({mixer['chunk_size']}) must be at most data.sequence_length ({n})")
        given = {name: option.default for name, option in inspect.signature(cls).parameters.items()} | mixer
        for option in ("cosine_length", "max_length"):
            if given.get(option) is not None and given[option] < n:
                raise ValueError(f"a mixer's {option} ({given[option]}) must be at least data.sequence_length ({n})")
        packs = getattr(cls, "packs", True) or MODELS.get(config.model["type"]).causal
        if config.data.packing == "documents" and not packs:
            raise ValueError(
                f"mixer {mixer['type']!r} reads a window as one text: it needs data.packing concatenate, got documents"
            )


def model_extras(config: Config) -> dict:
    """Options of the model that follow from other sections of the config."""
    if (kind := config.model.get("type")) not in MODELS.names():  # which the registry explains
        return {}
    default = inspect.signature(MODELS.get(kind)).parameters["position_embedding"].default
    learned = config.model.get("position_embedding", default) == "learned" and "max_length" not in config.model
    return {"max_length": config.data.sequence_length} if learned else {}


def make_model(config: Config, build: Callable[[keras.Model], None] = methodcaller("build")) -> keras.Model:
    """The config's model, with the weights that `build` makes."""
    extras = {"dtype": config.train.precision, "name": config.model["type"]}
    model = MODELS.build(config.model, **model_extras(config), **extras)
    build(model)
    return model


def predicted(config: Config) -> int:
    """Positions of a sequence on which training runs a head over tokens."""
    n = config.data.sequence_length
    if not MODELS.get(config.model["type"]).predicts_tokens:
        return 0
    return n if config.masking is None else round(config.masking.rate * n)


def training_flops_per_step(config: Config, model: keras.Model) -> int:
    """Model FLOPs of a step: three times the forward pass. Recomputation does not count."""
    return 3 * config.batch_size * model.flops(config.data.sequence_length, predicted(config))
