"""The files of a model directory, except tokens, tokenizer and checkpoints."""

import importlib.metadata
import json
import platform
from collections.abc import Iterable

import tensorflow as tf
import yaml

from flash_tf import config as configs
from flash_tf import config_merge

CONFIG, METRICS, EVALUATIONS, VERSIONS = "config.yaml", "metrics.jsonl", "evaluations.jsonl", "versions.json"
TOKENIZER = "tokenizer.model"
PACKAGES = ("flash-tf", "tensorflow", "keras", "tensorflow-text", "tensorflow-datasets", "tf-models-official", "numpy")
MAY_CHANGE = (  # options that may differ between two starts of one run
    "train.steps_per_loop",
    "train.checkpoint_every",
    "train.keep",
    "train.jit_compile",
    "evaluation.",
    "strategy.",
    "data.cache",
    "profile",
    "paper",
)
EXTENDED = ("train.steps", "optimizer.schedule_steps", "optimizer.constant_after")  # options that --extend changes


def load_config(model_dir: str, overrides: Iterable[str] = ()) -> configs.Config:
    """The resolved config of a model directory, with overrides as in `config.load`."""
    path = f"{model_dir}/{CONFIG}"
    if not tf.io.gfile.exists(path):
        raise ValueError(f"{model_dir} is not a model directory: it has no {CONFIG}, which `flash-tf train` writes")
    try:
        with tf.io.gfile.GFile(path) as file:
            values = yaml.safe_load(file.read())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: it is not YAML") from error
    config = configs.from_mapping(configs.Config, values, where=path)
    if not overrides:
        return config
    values = configs.to_mapping(config)
    for override in overrides:
        config_merge.set_option(values, override)
    return configs.from_mapping(configs.Config, values, where=path)


def claim(model_dir: str, config: configs.Config, extends: bool = False) -> None:
    """Writes the resolved config and the packages' versions, unless the directory holds checkpoints of another run.

    Args:
      model_dir: The model directory.
      config: The experiment.
      extends: Whether the options that `--extend` changes may differ.

    Raises:
      ValueError: The directory holds another run. The message names an option that differs.
    """
    trained = tf.io.gfile.isdir(model_dir) and bool(tf.io.gfile.glob(f"{model_dir}/checkpoints/*"))
    if trained and tf.io.gfile.exists(f"{model_dir}/{CONFIG}"):
        there = load_config(model_dir)
        changed = config_merge.differences(configs.to_mapping(there), configs.to_mapping(config))
        changed = [one for one in changed if not one[0].startswith(MAY_CHANGE + (EXTENDED if extends else ()))]
        if changed:
            key, old, new = changed[0]
            raise ValueError(
                f"{model_dir} holds a run with {key} = {old!r}, this one has {new!r}"
                f"{f' (and {len(changed) - 1} more options differ)' if len(changed) > 1 else ''}; "
                f"use another --model-dir, or `flash-tf train {model_dir}` to continue it"
            )
    elif trained:
        raise ValueError(f"{model_dir} has checkpoints but no {CONFIG}: use another --model-dir")
    elif tf.io.gfile.exists(f"{model_dir}/{TOKENIZER}"):
        tf.io.gfile.remove(f"{model_dir}/{TOKENIZER}")  # a first try left it, perhaps from other text
    tf.io.gfile.makedirs(model_dir)
    _write(f"{model_dir}/{CONFIG}", configs.dump(config))
    _write(f"{model_dir}/{VERSIONS}", json.dumps(versions(), indent=2) + "\n")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree
            found[name] = "not installed"
    return found


class Records:
    """A file of JSON lines, one for each step. A resumed run continues it without gaps or repeated steps.

    Args:
      path: The file, local or gs://; None to write nothing.
      step: Drops lines of later steps. A run that died after writing them writes them again.
    """

    def __init__(self, path: str | None, step: int):
        self._path = path
        if path is not None:
            lines = [line for line in self._lines() if line["step"] <= step]
            _write(path, "".join(json.dumps(line) + "\n" for line in lines))

    def _lines(self):
        if not tf.io.gfile.exists(self._path):
            return
        with tf.io.gfile.GFile(self._path) as file:
            for line in file.read().splitlines():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    return  # the process died while it wrote this last line

    def append(self, lines: list[dict]) -> None:
        """Adds records. They are on disk when it returns."""
        if self._path is not None:
            with tf.io.gfile.GFile(self._path, "a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))


def _write(path, text):
    with tf.io.gfile.GFile(f"{path}.partial", "w") as file:
        file.write(text)
    tf.io.gfile.rename(f"{path}.partial", path, overwrite=True)
