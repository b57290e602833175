"""Token files as batches of an exported program, in the order in which `flash-tf train` reads a split of one shard."""

import types
from collections.abc import Iterator

import numpy as np

from flash_tf.compiling.manifest import Manifest, Program
from flash_tf.data.packing import Packing, Windows
from flash_tf.data.token_cache import TokenizedShard

Batch = dict[str, np.ndarray]
FIRST = 5  # the first id of an ordinary piece, where a vocabulary begins with the special ones


class Stream:
    """The windows of one stream of tokens.

    Training reads them endlessly, each epoch in its own order. The order is drawn from the seed as
    `flash_tf.data.stream.WindowStream` draws it for a first shard, so both read a split of one shard alike.

    Args:
      tokens: The split in order, an eos after each document.
      manifest: Of the artifact whose programs take the batches.
      pad_last: Whether the last window is padded if it is not full, rather than dropped.

    Raises:
      ValueError: When there is no window.
    """

    def __init__(self, tokens: np.ndarray, manifest: Manifest, *, pad_last: bool):
        self._manifest, data = manifest, manifest.config["data"]
        packing = Packing(
            kind=data["packing"],
            sequence_length=data["sequence_length"],
            overlap=manifest.overlap,
            align=manifest.align,
        )
        ends = np.flatnonzero(tokens == manifest.ids["eos"]) + 1
        offsets = np.unique(np.concatenate([[0], ends, [len(tokens)]]))
        shard = TokenizedShard(tokens=tokens, offsets=offsets, words=0, bytes=0)
        ids = types.SimpleNamespace(**{f"{name}_id": id for name, id in manifest.ids.items()})
        self._windows: Windows = packing.cut(shard, ids, pad_last=pad_last)
        if not len(self._windows):
            raise ValueError(f"a window needs {data['sequence_length']} tokens, the file has {len(tokens)}")
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, position: int, program: Program) -> Batch:
        """A batch of a program after `position` windows were read: the next ones, in each epoch's order."""
        numbers, indices, rows = [], [], program.batch_size
        while len(indices) < rows:
            epoch, start = divmod(position + len(indices), len(self))
            found = self._shuffled(epoch)[start : start + rows - len(indices)]
            numbers += [(epoch, start + i) for i in range(len(found))]
            indices += found.tolist()
        return self._read(np.array(indices), np.array(numbers, np.int32), program)

    def once(self, program: Program) -> Iterator[Batch]:
        """All windows in the order of the text, in a program's batches, the last filled up with padding."""
        rows, pad = program.batch_size, self._manifest.ids["pad"]
        for start in range(0, len(self), rows):
            numbers = np.arange(start, min(start + rows, len(self)))
            window = np.stack([np.zeros_like(numbers), numbers], axis=1).astype(np.int32)
            batch = self._read(numbers, window, program)
            fill = ((0, rows - len(numbers)), (0, 0))
            yield {n: np.pad(x, fill, constant_values=pad if n == "tokens" else 0) for n, x in batch.items()}

    def _read(self, indices, window, program):
        make = {"tokens": self._windows.tokens, "segment_ids": self._windows.segment_ids, "window": lambda _: window}
        return {a.name: make[a.name](indices) for a in program.arguments if a.role == "batch"}

    def _shuffled(self, epoch):
        if self._order[0] != epoch:
            raw = np.random.PCG64(np.random.SeedSequence([self._manifest.seed, epoch, 1])).random_raw(len(self))
            self._order = epoch, np.argsort(raw, kind="stable")
        return self._order[1]


def read_tokens(path: str, vocabulary_size: int) -> np.ndarray:
    """The tokens of a `.npy` file, mapped into memory.

    Raises:
      ValueError: Unless it is one flat array of uint16 or int32 ids below V.
    """
    try:
        tokens = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(tokens, np.ndarray):
        raise ValueError(f"{path} is no .npy file: it holds several arrays, as an .npz does")
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.int32):
        raise ValueError(f"{path} must be a flat array of uint16 or int32, got {tokens.dtype} {list(tokens.shape)}")
    for start in range(0, len(tokens), 1 << 24):  # 64 MB at a time
        part = tokens[start : start + (1 << 24)]
        if part.max() >= vocabulary_size or part.min() < 0:
            wrong = part[(part >= vocabulary_size) | (part < 0)][0]
            raise ValueError(f"{path} holds token {wrong}, the model's vocabulary has {vocabulary_size}")
    return tokens


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
