"""Numbers from a seed and a name, the same where a step is traced and where it runs. Needs NumPy alone."""

import base64
import hashlib
import zlib

import numpy as np

ORDINARY = 3  # ids from this one up to as many before the last are mostly ordinary pieces
FIRST = 5  # the first id of an ordinary piece, where a vocabulary begins with the special ones


def initial(path: str, shape: tuple[int, ...], initializer: dict, seed: int) -> np.ndarray:
    """The first value of a variable, float32.

    Args:
      path: The variable's path. The numbers depend on it, and not on the order of variables.
      shape: The variable's shape.
      initializer: `{"kind": "normal", "mean", "stddev"}`, `{"kind": "uniform", "low", "high"}`, `{"kind": "constant",
        "value"}`, or `{"kind": "given", "float32"}` with the numbers themselves, see `given`.
      seed: The run's seed; not negative.

    Raises:
      ValueError: The initializer is of another kind.
    """
    if initializer["kind"] == "constant":
        return np.full(shape, initializer["value"], np.float32)
    if initializer["kind"] == "given":
        data = zlib.decompress(base64.b64decode(initializer["float32"]))
        return np.frombuffer(data, "<f4").astype(np.float32).reshape(shape)
    if initializer["kind"] == "uniform":
        low, high = np.float32(initializer["low"]), np.float32(initializer["high"])
        return np.asarray(low + (high - low) * generator(path, seed).random(shape, np.float32), np.float32)
    if initializer["kind"] != "normal":
        known = "normal, uniform, constant or given"
        raise ValueError(f"{path}: an initializer must be {known}, got {initializer['kind']!r}")
    drawn = generator(path, seed).standard_normal(shape, np.float32)
    drawn = np.asarray(drawn, np.float32)  # for shape () NumPy draws a float
    drawn *= np.float32(initializer["stddev"])
    drawn += np.float32(initializer["mean"])
    return drawn


def given(numbers: np.ndarray) -> dict:
    """An initializer that holds its numbers, compressed and in base64. A few weights follow a rule of their own."""
    data = zlib.compress(np.asarray(numbers, "<f4").tobytes(), 9)
    return {"kind": "given", "float32": base64.b64encode(data).decode("ascii")}


def made_up(shapes: dict[str, tuple[int, ...]], vocabulary_size: int, seed: int) -> dict[str, np.ndarray]:
    """A batch of ordinary tokens, drawn uniformly: the windows 0, 1, … of epoch 0, each with one document.

    Args:
      shapes: Shape of `tokens`, and of `window` and `segment_ids` if the program takes them.
      vocabulary_size: V.
      seed: The run's seed.
    """
    batch_size = shapes["tokens"][0]
    draw = generator("tokens", seed).integers
    batch = {
        "tokens": draw(ORDINARY, vocabulary_size - ORDINARY, shapes["tokens"], np.int32),
        "segment_ids": np.ones(shapes["tokens"], np.int32),
        "window": np.stack([np.zeros(batch_size, np.int32), np.arange(batch_size, dtype=np.int32)], axis=1),
    }
    return {name: batch[name] for name in shapes}


def likely_tokens(vocabulary_size: int, eos: int, seed: int, count: int) -> np.ndarray:
    """Tokens with frequencies like a text's, int32 `[count]`: by Zipf's law, with an eos after about 500.

    A part of a step's time depends on how many rows of the embedding a batch reads, and how often it reads each.
    """
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, vocabulary_size - FIRST + 1)
    ranks = np.searchsorted(np.cumsum(share) / share.sum(), rng.random(count))
    tokens = (FIRST + ranks).astype(np.int32)
    tokens[rng.random(count) < 1 / 500] = eos
    return np.minimum(tokens, vocabulary_size - 1)


def generator(name: str, seed: int) -> np.random.Generator:
    """NumPy's Philox. Its key is the seed and the first 64 bits of the name's SHA-256; its counter starts at 0."""
    digest = hashlib.sha256(name.encode()).digest()
    key = np.array([seed, int.from_bytes(digest[:8], "little")], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def fingerprint(seed: int) -> str:
    """A hash of numbers that this NumPy draws. NumPy guarantees Philox's raw bits, but not the normals from them."""
    drawn = generator("fingerprint", seed)
    numbers = drawn.standard_normal(1000, np.float32).tobytes() + drawn.integers(0, 1000, 1000, np.int32).tobytes()
    return hashlib.sha256(numbers).hexdigest()[:16]
