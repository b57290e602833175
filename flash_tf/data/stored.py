"""Files on a disk or in a bucket, for programs with and without TensorFlow."""

import os
import re
import uuid
from typing import Any

from flash_tf import owned_files


def read(path: str) -> bytes | None:
    """The content of a file; None if there is none."""
    try:
        return _path(path).read_bytes()
    except FileNotFoundError:
        return None


def write(path: str, data: Any) -> None:
    """Writes a file as a whole: a reader, and a process that is killed, find the old content or the new one.

    Several processes may write the same file at once.

    Raises:
      OSError: It cannot be written. Nothing half-written stays.
    """
    if not owned_files.is_local(path):
        _path(path).write_bytes(bytes(data))  # a bucket shows an object when it is whole
        return
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    partial = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def remove_partial(folder: str) -> None:
    """Removes what killed processes left of files that `write` began in a folder that no other process writes to."""
    for name in names(folder):
        if is_partial(name):
            remove(f"{folder}/{name}")


def is_partial(name: str) -> bool:
    """Whether a name is one that `write` gives to a file that it has not finished."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}\.partial", name) is not None


def names(folder: str) -> set[str]:
    """The names of all that is in a folder; empty if there is none."""
    try:
        if owned_files.is_local(folder):
            return set(os.listdir(folder))  # a million in a second
        path = _path(folder)
        return {one.name for one in path.iterdir()} if path.is_dir() else set()  # TensorFlow's error is of another type
    except FileNotFoundError:
        return set()


def remove(path: str) -> None:
    """Removes a file that may be gone."""
    _path(path).unlink(missing_ok=True)


def _path(path):
    from etils import epath  # TensorFlow Datasets and Orbax bring it

    return epath.Path(path)
