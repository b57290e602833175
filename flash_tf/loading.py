"""Saved models of every kind, by one function."""

import os
import warnings
from pathlib import Path

import keras

from flash_tf import owned_files, presets
from flash_tf.models.language_model import LanguageModel  # with its package, which registers every class for Keras


def load(path: str | os.PathLike) -> keras.Model:
    """Reads a model with its weights and its tokenizer, ready for `generate`, `stream`, `fill_mask` or a call.

    Args:
      path: A folder of `save_to_preset`, a `.keras` file, or the model directory of `flash-tf train`, which may be
        gs://. From a run it takes the checkpoint with the lowest validation loss, or warns and takes the newest good
        one if that is damaged; it needs `flash-tf[tensorflow]`.

    Returns:
      The model, not compiled. Its `tokenizer` is None if none was saved with it.

    Raises:
      ValueError: There is no model at `path`, or it is damaged.
      ImportError: `path` is a run, and TensorFlow is not installed.

    Example:
      >>> import flash_tf as ft
      >>> mixer = {"type": "flash", "chunk_size": 4, "key_dim": 8}
      >>> model = ft.models.CausalLM(100, width=16, depth=2, mixer=mixer)
      >>> model.save_to_preset("preset")
      >>> len(ft.load("preset").generate([[5, 17, 3]], max_new_tokens=4)[0])
      4
    """
    path = os.fspath(path)
    if path.endswith(".keras"):
        return _load_file(path)
    if (Path(path) / presets.CONFIG).is_file():
        return LanguageModel.from_preset(path)
    if not owned_files.is_local(path) or (Path(path) / "config.yaml").is_file():
        return _load_run(path)
    raise ValueError(
        f"{path} has no model: load needs a .keras file, a preset with {presets.CONFIG}, or a run with config.yaml"
    )


def _load_file(path):
    model = keras.saving.load_model(path, compile=False)
    if not hasattr(model, "tokenizer"):  # not one of `flash_tf.models`
        model.tokenizer = None
    return model


def _load_run(path):
    try:
        from flash_tf.training.restore import restore

        return restore(path, warnings.warn).model
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{path} is a training run, and TensorFlow reads its checkpoints: pip install 'flash-tf[tensorflow]'"
        ) from error
