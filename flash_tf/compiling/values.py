"""Numbers that whoever traces a step and whoever runs it make alike, from a seed and a name. Needs NumPy alone."""

import base64
import hashlib
import zlib

import numpy as np

ORDINARY = 3  # ids from this one, and up to as many before the last, are mostly of ordinary pieces


def initial(path: str, shape: tuple[int, ...], initialiser: dict, seed: int) -> np.ndarray:
    """The first value of a variable, float32.

    Args:
      path: The variable's. It decides the numbers, so that their order among variables does not.
      shape: Its shape.
      initialiser: `{"kind": "normal", "mean", "stddev"}`, `{"kind": "uniform", "low", "high"}`, `{"kind": "constant",
        "value"}`, or `{"kind": "given", "float32"}`, the numbers themselves, see `given`.
      seed: Of the run; not negative.

    Raises:
      ValueError: For another kind.
    """
    if initialiser["kind"] == "constant":
        return np.full(shape, initialiser["value"], np.float32)
    if initialiser["kind"] == "given":
        data = zlib.decompress(base64.b64decode(initialiser["float32"]))
        return np.frombuffer(data, "<f4").astype(np.float32).reshape(shape)
    if initialiser["kind"] == "uniform":
        low, high = np.float32(initialiser["low"]), np.float32(initialiser["high"])
        return np.asarray(low + (high - low) * generator(path, seed).random(shape, np.float32), np.float32)
    if initialiser["kind"] != "normal":
        known = "normal, uniform, constant or given"
        raise ValueError(f"{path}: an initialiser is {known}, got {initialiser['kind']!r}")
    drawn = generator(path, seed).standard_normal(shape, np.float32)
    drawn = np.asarray(drawn, np.float32)  # of shape () NumPy draws a float
    drawn *= np.float32(initialiser["stddev"])
    drawn += np.float32(initialiser["mean"])
    return drawn


def given(numbers: np.ndarray) -> dict:
    """An initialiser that is its numbers, for the few that follow a rule of their own: compressed, in base64."""
    data = zlib.compress(np.asarray(numbers, "<f4").tobytes(), 9)
    return {"kind": "given", "float32": base64.b64encode(data).decode("ascii")}


def made_up(shapes: dict[str, tuple[int, ...]], vocabulary_size: int, seed: int) -> dict[str, np.ndarray]:
    """A batch of ordinary tokens, all as likely; the windows 0, 1, … of epoch 0; where documents are packed, one a row.

    Args:
      shapes: Of `tokens`, and of `window` and `segment_ids` where the program takes them.
      vocabulary_size: V.
      seed: Of the run.
    """
    rows = shapes["tokens"][0]
    draw = generator("tokens", seed).integers
    batch = {
        "tokens": draw(ORDINARY, vocabulary_size - ORDINARY, shapes["tokens"], np.int32),
        "segment_ids": np.ones(shapes["tokens"], np.int32),
        "window": np.stack([np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)], axis=1),
    }
    return {name: batch[name] for name in shapes}


def generator(name: str, seed: int) -> np.random.Generator:
    """NumPy's Philox with the key (seed, the first 64 bits of the name's SHA-256) and a counter that starts at 0."""
    digest = hashlib.sha256(name.encode()).digest()
    key = np.array([seed, int.from_bytes(digest[:8], "little")], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def fingerprint(seed: int) -> str:
    """Of the numbers that this NumPy draws: it promises the raw bits of Philox, but not the normals made of them."""
    drawn = generator("fingerprint", seed)
    numbers = drawn.standard_normal(1000, np.float32).tobytes() + drawn.integers(0, 1000, 1000, np.int32).tobytes()
    return hashlib.sha256(numbers).hexdigest()[:16]
