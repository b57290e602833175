"""Weights as plain files, for a run that was trained without TensorFlow. Needs NumPy alone.

`weights/manifest.json` holds the `step`, each weight's `dtype` and `shape` by its path, and each shard's SHA-256. A
shard is an `.npz` file of flat fragments, each under the path of its weight. A weight that does not fit in a shard
continues in the next. Weights and shards are in the order of the manifest.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

FOLDER, MANIFEST = "weights", "manifest.json"
OVERHEAD = 1024  # bytes, more than the headers of a fragment in a shard


def write(model_dir: str, step: int, weights: Iterable[tuple[str, np.ndarray]], shard_bytes: int) -> int:
    """Writes weights and replaces the ones that are there. Returns the number of shards.

    Args:
      model_dir: A model directory.
      step: The step of the weights.
      weights: Pairs of path and value.
      shard_bytes: The largest size of a shard, in bytes.

    Raises:
      ValueError: `shard_bytes` is too small, or a weight is not finite.
    """
    if shard_bytes < 64 * OVERHEAD:
        raise ValueError(f"a shard of weights needs {64 * OVERHEAD} bytes or more, got {shard_bytes}")
    partial, folder, old = (Path(model_dir, f"{FOLDER}{suffix}") for suffix in (".partial", "", ".old"))
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    shapes, hashes = {}, {}
    for number, fragments in enumerate(_shards(weights, shapes, shard_bytes)):
        path = partial / f"shard-{number:03d}.npz"
        np.savez(path, **fragments)
        hashes[path.name] = _sha256(path)
    manifest = {"step": step, "weights": shapes, "shards": hashes}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return len(hashes)


def _shards(weights, shapes, shard_bytes) -> Iterator[dict[str, np.ndarray]]:
    """The fragments of each shard; adds the weights' shapes to `shapes`."""
    fragments, room = {}, shard_bytes
    for name, value in weights:
        _check_finite(name, value)
        rest = np.ravel(value)
        shapes[name] = {"dtype": rest.dtype.name, "shape": list(np.shape(value))}
        while rest.size:
            fits = (room - OVERHEAD - 2 * len(name)) // rest.itemsize
            if fits < min(rest.size, OVERHEAD):
                yield fragments
                fragments, room = {}, shard_bytes
                continue
            fragments[name], rest = rest[:fits], rest[fits:]
            room -= fragments[name].nbytes + OVERHEAD + 2 * len(name)
    yield fragments


def step(model_dir: str) -> int | None:
    """The step of the weights; None if there are none.

    Raises:
      ValueError: The weights are damaged.
    """
    path = Path(model_dir, FOLDER, MANIFEST)
    return int(_manifest(path)["step"]) if path.is_file() else None


def read(model_dir: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields pairs of path and value.

    Args:
      model_dir: A model directory.
      shapes: Path -> shape of every weight of the model.

    Raises:
      ValueError: The weights are damaged, or belong to another model.
    """
    folder = Path(model_dir, FOLDER)
    manifest = _manifest(folder / MANIFEST)
    found = {name: tuple(weight["shape"]) for name, weight in manifest["weights"].items()}
    if wrong := sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name)):
        needed, got = (of.get(wrong[0], "none") for of in (shapes, found))
        raise ValueError(f"{folder} is of another model: {wrong[0]} needs shape {needed}, got {got}")
    fragments = _fragments(folder, manifest["shards"])
    for name, weight in manifest["weights"].items():
        value, done = np.empty(found[name], weight["dtype"]), 0
        while done < value.size:
            fragment = next(fragments, (None, None))
            if fragment[0] != name:
                raise ValueError(f"{folder} is damaged: it holds {done} of the {value.size} numbers of {name}")
            value.flat[done : done + fragment[1].size] = fragment[1]
            done += fragment[1].size
        _check_finite(f"{folder} is damaged: {name}", value)
        yield name, value


def _check_finite(what, value):
    if not np.isfinite(value).all():
        raise ValueError(f"{what} is not finite")


def _fragments(folder, shards):
    for file, sha256 in shards.items():
        path = folder / file
        if not path.is_file() or _sha256(path) != sha256:
            raise ValueError(f"{path} is {'damaged' if path.is_file() else 'missing'}: copy it again")
        with np.load(path) as fragments:
            for name in fragments.files:
                yield name, fragments[name]


def _manifest(path):
    try:
        manifest = json.loads(path.read_text())
        if {"step", "weights", "shards"} <= manifest.keys():
            return manifest
    except (ValueError, AttributeError):
        pass
    raise ValueError(f"{path} is damaged: it needs a JSON object with step, weights and shards")


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
