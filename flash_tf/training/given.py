"""Examples that a caller hands over, kept in the run: so it can be resumed and evaluated like any other."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from flash_tf import owned_files
from flash_tf.config import Config
from flash_tf.data import stored
from flash_tf.training import run_directory
from flash_tf.training.owner import Owner

WRITER = "flash-tf train"
SPLITS = ("train", "validation")


@contextlib.contextmanager
def with_examples(
    config: Config,
    model_dir: str,
    dataset: Mapping[str, Iterable[dict]],
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[Config, Owner]]:
    """Gives the config with a source that reads the examples, and the owner of the run, which is this process.

    The examples are written to the run as JSON lines. A run that has begun keeps its examples.

    Args:
      config: The experiment. Its `data.source` is replaced.
      model_dir: The folder of the run, which must be local.
      dataset: "train" and "validation": iterables of dictionaries, or `tf.data.Dataset`s of them.
      report: Called with a line before a wait.

    Raises:
      ValueError: A split is missing, an example is no dictionary of JSON values, the folder is in a bucket, several
        processes share the run, another process owns it, or it holds a run with other examples.
    """
    if not isinstance(dataset, Mapping) or set(dataset) != set(SPLITS):
        raise ValueError(f"dataset needs the splits {', '.join(SPLITS)}, got {', '.join(map(str, dataset))}")
    if not owned_files.is_local(model_dir):
        raise ValueError(f"examples that are handed over need a local run, got {model_dir}")
    if config.strategy.type == "multi_worker" or config.strategy.workers is not None:
        raise ValueError("examples that are handed over need one process: workers read them from files")
    folder = os.path.join(os.path.abspath(model_dir), "examples")
    files = {f"{split}.jsonl": _lines(split, dataset[split]) for split in SPLITS}
    source = {"type": "example_files", **{split: f"{folder}/{split}.jsonl" for split in SPLITS}}
    with Owner(model_dir, report) as owner:
        if run_directory.recorded(model_dir):
            if any(_parsed(stored.read(os.path.join(folder, name))) != _parsed(new) for name, new in files.items()):
                raise ValueError(
                    f"{model_dir} holds a run with other examples, or in another order: use another folder, or "
                    f"`flash-tf train {model_dir}` to go on with its own"
                )
        else:
            owned_files.write(folder, files, WRITER)
        yield dataclasses.replace(config, data=dataclasses.replace(config.data, source=source)), owner


def _parsed(content):
    return [json.loads(line) for line in (content or b"").splitlines()]


def _lines(split, examples):
    examples = examples.as_numpy_iterator() if hasattr(examples, "as_numpy_iterator") else examples  # of tf.data
    lines = []
    for number, example in enumerate(examples, 1):
        if not isinstance(example, Mapping):
            raise ValueError(f"{split}, example {number} must be a dictionary, got a {type(example).__name__}")
        try:
            lines.append(json.dumps(dict(example), default=_plain, ensure_ascii=False))
        except TypeError as error:
            raise ValueError(f"{split}, example {number} needs JSON values: {error}") from None
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    """A value of NumPy or TensorFlow as JSON has it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(value, "numpy"):  # a tensor
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"got a {type(value).__name__}")
