"""Presets: a model as a folder with `config.json`, `model.weights.h5` and, if it has one, its tokenizer's file."""

import importlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from flash_tf import owned_files
from flash_tf.owned_files import TOKENIZERS
from flash_tf.registry import check_names

WRITER = "save_to_preset"
CONFIG, WEIGHTS = "config.json", "model.weights.h5"
KERAS = ("name", "dtype", "trainable")  # options of every model
KEPT = ("module", "class_name", "config", "registered_name")  # of a serialized model


def save(model: keras.Model, directory: str, files: Mapping[str, str] | None = None) -> None:
    """Writes a model, and its `tokenizer` if it has one. An older preset is replaced once the new one is whole.

    Args:
      model: A model of `flash_tf.models`.
      directory: A new folder, or an older preset.
      files: Further files as name -> text, for example README.md.

    Raises:
      ValueError: The folder holds something else.
    """
    if not model.built:
        model.build()
    with owned_files.replacing(str(directory), WRITER, _older) as folder:
        model.save_weights(folder / WEIGHTS)
        if model.tokenizer is not None:
            model.tokenizer.save(str(folder / model.tokenizer.file))
        whole = keras.saving.serialize_keras_object(model)
        kept = {name: whole[name] for name in KEPT}
        (folder / CONFIG).write_text(json.dumps({**kept, "keras_version": keras.__version__}, indent=2) + "\n")
        for name, text in (files or {}).items():
            (folder / name).write_text(text, "utf-8")


def _older(folder):
    """The files of a preset from before there were manifests, which its config tells: no other has these keys."""
    found = owned_files.json_of(f"{folder}/{CONFIG}")
    return (CONFIG, WEIGHTS, TOKENIZERS[0]) if found.keys() == {*KEPT, "keras_version"} else ()


def load(cls: type, directory: str, options: dict) -> keras.Model:
    """The model of a preset, on any backend of Keras.

    Args:
      cls: The class that the model must have.
      directory: A folder of `save`.
      options: Constructor options that override the preset's, as `dtype` and `dropout`.

    Raises:
      ValueError: There is no preset, its files are damaged, or its model has another class, lacks an option, does not
        fit one, or is quantized and should get another dtype.
    """
    folder = Path(directory)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{directory} is no preset: it has no {CONFIG}, which `save_to_preset` writes")
    if (kind := class_of(directory)) is not object:
        check_names(kind, own(options), where=f"{directory}: {kind.__name__}")
    try:
        found = json.loads((folder / CONFIG).read_text("utf-8"))
        quantized = found["config"]["dtype"]["class_name"] == "DTypePolicyMap"
        model = keras.saving.deserialize_keras_object({**found, "config": {**found["config"], **options}})
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / CONFIG} is not the config of a model: {' '.join(str(error).split())}") from error
    if quantized and "dtype" in options:
        raise ValueError(f"{directory} has a quantized model: it needs its own dtype, got dtype={options['dtype']!r}")
    if not isinstance(model, cls):
        raise ValueError(f"{directory} has a {type(model).__name__}, not a {cls.__name__}")
    build_unfilled(model)
    try:
        model.load_weights(folder / WEIGHTS)
    except (OSError, KeyError, ValueError) as error:
        line = " ".join(str(error).partition("List of objects")[0].split())
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        what = f"does not fit {given}" if given else f"is damaged, or does not belong to {CONFIG}"
        raise ValueError(f"{folder / WEIGHTS} {what}: {line}") from error
    model.tokenizer = read_tokenizer(directory, model.vocabulary_size)
    return model


def build_unfilled(model: keras.Model) -> None:
    """Builds a model with zeros for weights that are read next, because drawing random ones takes longer than reading.

    Args:
      model: A model of `flash_tf.models` without weights.
    """
    with keras.StatelessScope():  # where it ends, Keras gives each variable what its initializer says
        model.build()
        for variable in model.weights:
            variable._initializer = keras.initializers.Zeros()  # no public function sets it


def class_of(directory: str) -> type:
    """The class of a preset's model; `object` if its config does not say, which `load` then explains."""
    found = owned_files.json_of(f"{directory}/{CONFIG}")
    return keras.saving.get_registered_object(found.get("registered_name")) or object


def own(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not of every Keras model."""
    return {name: value for name, value in options.items() if name not in KERAS}


def has(directory: str, options: Mapping[str, Any]) -> bool:
    """Whether a preset's model has these options."""
    known = owned_files.json_of(f"{directory}/{CONFIG}").get("config", {})
    return all(known.get(name) == value for name, value in options.items())


def read_tokenizer(directory: str, vocabulary_size: int) -> Any:
    """The tokenizer in a folder, or None if it has none. Where the packages that run it are missing, it warns."""
    path = next((path for name in TOKENIZERS if (path := Path(directory, name)).is_file()), None)
    if path is None:
        return None
    try:  # by name: models know no data
        return _load_tokenizer(importlib.import_module("flash_tf.data.tokenizers").load, str(path), vocabulary_size)
    except ModuleNotFoundError as error:
        line = f"{directory}: the model takes only token ids: its tokenizer needs 'flash-tf[tensorflow]' ({error})"
        warnings.warn(line, stacklevel=2)
        return None


def _load_tokenizer(load, path, vocabulary_size):
    try:
        return load(path, vocabulary_size)
    except ValueError:  # one that somebody gave the model need not fit
        return load(path)
