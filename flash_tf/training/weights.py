"""Weights as plain files, for a run that was trained where there is no TensorFlow. Needs NumPy alone.

`weights/manifest.json` holds the `step`, each weight's `dtype` and `shape` by its path, and each shard's SHA-256. A
shard is an `.npz` file of flat pieces, under the paths of their weights; a weight that a shard has no room for goes on
in the next. Weights and shards are in the order of the manifest.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

FOLDER, MANIFEST = "weights", "manifest.json"
OVERHEAD = 1024  # bytes: more than a piece's headers take in a shard


def write(model_dir: str, step: int, weights: Iterable[tuple[str, np.ndarray]], shard_bytes: int) -> int:
    """Writes weights, path and value each, in place of those that are there; returns how many shards there are.

    Raises:
      ValueError: When shards are too small for anything.
    """
    if shard_bytes < 64 * OVERHEAD:
        raise ValueError(f"a shard of weights needs {64 * OVERHEAD} bytes or more, got {shard_bytes}")
    partial, folder, old = (Path(model_dir, f"{FOLDER}{suffix}") for suffix in (".partial", "", ".old"))
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    shapes, hashes = {}, {}
    for number, pieces in enumerate(_shards(weights, shapes, shard_bytes)):
        path = partial / f"shard-{number:03d}.npz"
        np.savez(path, **pieces)
        hashes[path.name] = _sha256(path)
    manifest = {"step": step, "weights": shapes, "shards": hashes}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return len(hashes)


def _shards(weights, shapes, shard_bytes) -> Iterator[dict[str, np.ndarray]]:
    """Pieces that fill a shard each; notes the weights' shapes."""
    pieces, room = {}, shard_bytes
    for name, value in weights:
        rest = np.ravel(value)
        shapes[name] = {"dtype": rest.dtype.name, "shape": list(np.shape(value))}
        while rest.size:
            fits = (room - OVERHEAD - 2 * len(name)) // rest.itemsize
            if fits < min(rest.size, OVERHEAD):
                yield pieces
                pieces, room = {}, shard_bytes
                continue
            pieces[name], rest = rest[:fits], rest[fits:]
            room -= pieces[name].nbytes + OVERHEAD + 2 * len(name)
    yield pieces


def step(model_dir: str) -> int | None:
    """The step whose weights are there; None if there are none.

    Raises:
      ValueError: When they are damaged.
    """
    path = Path(model_dir, FOLDER, MANIFEST)
    return int(_manifest(path)["step"]) if path.is_file() else None


def read(model_dir: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
    """The weights, path and value each.

    Args:
      model_dir: A model directory.
      shapes: Path -> shape of every weight that the model has.

    Raises:
      ValueError: When they are damaged, or another model's.
    """
    folder = Path(model_dir, FOLDER)
    manifest = _manifest(folder / MANIFEST)
    found = {name: tuple(weight["shape"]) for name, weight in manifest["weights"].items()}
    if wrong := sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name)):
        needed, got = (of.get(wrong[0], "none") for of in (shapes, found))
        raise ValueError(f"{folder} is of another model: {wrong[0]} needs shape {needed}, got {got}")
    pieces = _pieces(folder, manifest["shards"])
    for name, weight in manifest["weights"].items():
        value, done = np.empty(found[name], weight["dtype"]), 0
        while done < value.size:
            piece = next(pieces, (None, None))
            if piece[0] != name:
                raise ValueError(f"{folder} is damaged: it holds {done} of the {value.size} numbers of {name}")
            value.flat[done : done + piece[1].size] = piece[1]
            done += piece[1].size
        yield name, value


def _pieces(folder, shards):
    for file, sha256 in shards.items():
        path = folder / file
        if not path.is_file() or _sha256(path) != sha256:
            raise ValueError(f"{path} is {'damaged' if path.is_file() else 'missing'}: copy it again")
        with np.load(path) as pieces:
            for name in pieces.files:
                yield name, pieces[name]


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
