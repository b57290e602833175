"""Public folders: config.json, and tensors in one safetensors file or in several with an index."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy bfloat16, in which many public weights are
import numpy as np
from safetensors import SafetensorError, safe_open

CONFIG, TENSORS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def read_config(folder: str) -> dict[str, Any]:
    """The public config of a folder; ValueError if there is none."""
    path = Path(folder, CONFIG)
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}, which a public model needs")
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} needs an object, got {type(found).__name__}")
    return found


class TensorFiles:
    """The tensors of a folder, read one by one.

    Args:
      names: Name -> open file, and the name there.
    """

    def __init__(self, names: Mapping[str, tuple[Any, str]]):
        self._files = dict(names)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: tuple(file.get_slice(own).get_shape()) for name, (file, own) in self._files.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        file, own = self._files[name]
        return file.get_tensor(own).astype("float32")


@contextlib.contextmanager
def open_tensors(folder: str, prefix: str, head: str) -> Iterator[TensorFiles]:
    """The tensors of a folder, whose files stay open inside.

    Args:
      folder: A public model.
      prefix: How names start in a model with a head. Names of a model without one get it.
      head: The name of the head's matrix, which has no prefix.

    Raises:
      ValueError: There is no file of tensors, or it is damaged.
    """
    with contextlib.ExitStack() as stack:
        names = {}
        for path in _paths(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is damaged or missing: {' '.join(str(error).split())}") from error
            names |= {name: (file, name) for name in file.keys()}  # noqa: SIM118  a file is no mapping
        if not any(name.startswith(prefix) for name in names):
            names = {name if name == head else prefix + name: found for name, found in names.items()}
        yield TensorFiles(names)


def _paths(folder):
    index = Path(folder, INDEX)
    if not index.is_file():
        if not Path(folder, TENSORS).is_file():
            raise ValueError(f"{folder} has no {TENSORS}: weights of other kinds, as pytorch_model.bin, are not read")
        return [Path(folder, TENSORS)]
    try:
        return [Path(folder, name) for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: it needs a weight_map") from error


def check_tensors(needed: Mapping[str, tuple], found: Mapping[str, tuple], ignored: str, where: str) -> None:
    """Raises a ValueError unless a folder has exactly the tensors that are needed. It names the first of each fault."""
    missing = [name for name in needed if name not in found]
    extra = [name for name in found if name not in needed and not re.search(ignored, name)]
    wrong = [name for name in needed if name in found and found[name] != needed[name]]
    faults = []
    if missing:
        faults.append(f"needs {_first(missing)}, which is not there")
    if extra:
        faults.append(f"has no place for {_first(extra)}")
    if wrong:
        name = wrong[0]
        faults.append(f"needs {_first(wrong)} of shape {list(needed[name])}, got {list(found[name])}")
    if faults:
        raise ValueError(f"{where}: the model {'; it '.join(faults)}")


def _first(names):
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
