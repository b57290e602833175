"""The windows or rows of a split in order: shuffled and endless for training, once and padded for evaluation."""

import math
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flash_tf.data.packing import Batch, Packing, Windows
from flash_tf.data.rows import RowPacking, Rows
from flash_tf.data.token_cache import TokenCache

if TYPE_CHECKING:
    import tensorflow as tf

AHEAD = 4  # batches that are read while a step runs


class WindowStream:
    """The training windows of a split; its position is one integer, the number of windows read so far.

    Every epoch shuffles the shards, and the windows within each shard, with numbers drawn from `seed`. So any position
    can be read at once, and a resumed run reads the same windows as one that never stopped. A background thread
    tokenizes shards in the order of their reading, no further than `limit`. Reading starts when the first is done.

    Args:
      cache: The tokenized split.
      packing: Cuts shards into windows, whose last, partial one is dropped; or the rows of labelled examples.
      seed: Seed of the order; not negative.
      limit: Number of windows that the run reads in all, from position 0.

    Raises:
      ValueError: The limit is below 1.
    """

    def __init__(self, cache: TokenCache, packing: Packing | RowPacking, *, seed: int, limit: int):
        if limit < 1:
            raise ValueError(f"limit must be at least 1 window, got {limit}")
        self._cache = cache
        self._packing = packing
        self._seed = seed
        self._limit = limit
        self._counts: dict[int, int] = {}  # windows of each shard seen so far
        self._open: tuple[tuple[int, int], Windows | Rows, np.ndarray] | None = None  # the shard that was read last
        self.failure: Exception | None = None
        # A daemon, so that a run that ends early does not wait for shards it will never read.
        threading.Thread(target=self._tokenize_ahead, daemon=True).start()

    def batch(self, position: int, count: int) -> Batch:
        """The windows `position` to `position + count - 1`.

        Returns:
          The packing's fields: `tokens` int32 `[count, n + overlap]`; `segment_ids` of the same shape if documents are
          packed; and `window` int32 `[count, 2]`, the epoch and the window's number in it, the same for every reader.

        Raises:
          ValueError: The whole split has no window.
          OSError: A shard cannot be tokenized, here or ahead in the background.
        """
        if self.failure is not None:
            raise self.failure
        slices, window = [], []
        while len(window) < count:
            epoch, number, shard, start = self._locate(position + len(window))
            windows, order = self._shuffled(epoch, shard)
            indices = order[start : start + count - len(window)]
            slices.append((windows, indices))
            window += [(epoch, number + i) for i in range(len(indices))]
        return _read(slices, window)

    def dataset(self, position: int, batch_size: int, pipelines: int = 1, pipeline: int = 0) -> "tf.data.Dataset":
        """The batches from `position` up to the limit, or one input pipeline's share of each.

        Args:
          position: Windows read before, by all pipelines together.
          batch_size: Windows in a global batch.
          pipelines: Input pipelines that share each batch. The first takes the first `batch_size / pipelines` windows.
          pipeline: The number of this pipeline.

        Returns:
          A deterministic dataset of the results of `batch`, with static shapes.

        Raises:
          ValueError: The pipelines cannot have equal shares.
        """
        if batch_size % pipelines or not 0 <= pipeline < pipelines:
            raise ValueError(
                f"batch_size must be a multiple of pipelines, and pipeline must be below pipelines, got "
                f"batch_size {batch_size}, pipelines {pipelines}, pipeline {pipeline}"
            )
        import tensorflow as tf

        share = batch_size // pipelines

        def batches() -> Iterator[Batch]:
            try:
                for start in range(position, self._limit, batch_size):
                    yield self.batch(start + pipeline * share, share)
            except Exception as error:  # tf.data replaces it by its own error, with a trace as message
                self.failure = error
                raise

        fields = self._packing.fields(self._cache.tokenizer)
        signature = {name: tf.TensorSpec((share, field.length), field.dtype) for name, field in fields.items()}
        signature["window"] = tf.TensorSpec((share, 2), tf.int32)
        return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(AHEAD)

    def stop(self) -> None:
        """Makes a wait for tokens end with an error; see `TokenCache.stop`."""
        self._cache.stop()

    def _tokenize_ahead(self) -> None:
        try:
            self._locate(self._limit - 1)
        except Exception as error:  # `batch` raises it, whatever it is
            self.failure = error

    def _locate(self, position: int) -> tuple[int, int, int, int]:
        """A window's epoch, its number in the epoch, its shard, and its place in the shard's order.

        Tokenizes the shards up to this window in the first epoch, and no others.
        """
        epoch, number = 0, position
        while True:
            before = 0
            for shard in _shuffle(len(self._cache.shards), self._seed, epoch, 0).tolist():
                if number < before + self._count(shard):
                    return epoch, number, shard, number - before
                before += self._count(shard)
            if before == 0:
                raise self._packing.nothing(self._cache, pad_last=False)
            epoch, number = divmod(position, before)

    def _count(self, shard: int) -> int:
        if shard not in self._counts:
            self._counts[shard] = len(self._windows(shard))
        return self._counts[shard]

    def _windows(self, shard: int) -> Windows | Rows:
        return self._packing.cut(self._cache.get(shard), self._cache.tokenizer, pad_last=False)

    def _shuffled(self, epoch: int, shard: int) -> tuple[Windows | Rows, np.ndarray]:
        """A shard's windows and their order in this epoch."""
        opened = self._open
        if opened is None or opened[0] != (epoch, shard):
            windows = self._windows(shard)
            order = _shuffle(len(windows), self._seed, epoch, shard + 1)
            self._open = opened = (epoch, shard), windows, order
        return opened[1], opened[2]


class EvaluationBatches:
    """A split once through, in its own order, in batches of one size. It can be iterated over any number of times.

    Partial windows are padded, so every token is there once (with overlap 1, every token is a target once). Windows of
    padding fill the last batch. The constructor tokenizes the shards that are needed.

    Args:
      cache: The tokenized split.
      packing: Cuts shards into windows, or the rows of labelled examples.
      batch_size: Windows in every batch.
      windows: Number of windows to read, from the beginning; None for all.

    Attributes:
      tokens: Tokens of text in the batches, eos included.
      words: Whitespace-separated words of the original text; None if `windows` cuts the split short, because then the
        tokens do not cover the words.

    Raises:
      ValueError: There is no window.
    """

    def __init__(
        self, cache: TokenCache, packing: Packing | RowPacking, *, batch_size: int, windows: int | None = None
    ):
        if windows is not None and windows < 1:
            raise ValueError(f"windows must be at least 1, or None for all, got {windows}")
        self._fields = packing.fields(cache.tokenizer)
        self._batch_size = batch_size
        self._shards: list[Windows | Rows] = []
        self._count, self.tokens, words, left_out = 0, 0, 0, 0
        rest = math.inf if windows is None else windows
        while self._count < rest and len(self._shards) < len(cache.shards):
            shard = cache.get(len(self._shards))
            cut = packing.cut(shard, cache.tokenizer, pad_last=True)
            taken = min(rest - self._count, len(cut))
            self._shards.append(cut)
            self._count += taken
            self.tokens += cut.text_tokens(taken)
            words += shard.words
            left_out += len(cut) - taken
        if self._count == 0:
            raise packing.nothing(cache, pad_last=True)
        self.words = words if left_out == 0 and len(self._shards) == len(cache.shards) else None

    def __len__(self) -> int:
        return -(-self._count // self._batch_size)

    def dataset(self, pipelines: int = 1, pipeline: int = 0) -> "tf.data.Dataset":
        """The batches as a dataset, or one input pipeline's share of each; `WindowStream.dataset` has the rule."""
        import tensorflow as tf

        first = next(iter(self))
        signature = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in first.items()}
        share = self._batch_size // pipelines
        begin = pipeline * share
        dataset = tf.data.Dataset.from_generator(lambda: iter(self), output_signature=signature)
        return dataset.map(lambda batch: {name: x[begin : begin + share] for name, x in batch.items()})

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches like `WindowStream.batch`. The epoch is 0, and the numbers count through the split."""
        sizes = np.array([len(windows) for windows in self._shards])
        ends = np.cumsum(sizes)
        for start in range(0, self._count, self._batch_size):
            numbers = np.arange(start, min(start + self._batch_size, self._count))
            shard = np.searchsorted(ends, numbers, side="right")
            slices = [(self._shards[s], numbers[shard == s] - (ends - sizes)[s]) for s in np.unique(shard)]
            yield self._filled(_read(slices, [(0, number) for number in numbers]))

    def _filled(self, batch: Batch) -> Batch:
        missing = self._batch_size - len(batch["tokens"])
        fills = {name: field.padding for name, field in self._fields.items()}
        return {
            name: np.pad(x, ((0, missing), (0, 0)), constant_values=fills.get(name, 0)) for name, x in batch.items()
        }


def _read(slices: Sequence[tuple[Windows | Rows, np.ndarray]], window: list[tuple[int, int]]) -> Batch:
    """A batch of windows: from each shard's the ones with these indices, shard after shard."""
    parts = [windows.read(indices) for windows, indices in slices]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {**joined, "window": np.array(window, np.int32)}


def _shuffle(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """The numbers below `count`, in an order that the other arguments decide.

    NumPy guarantees the raw stream of a bit generator, but not the result of `Generator.permutation`.
    """
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch, purpose])).random_raw(count)
    return np.argsort(raw, kind="stable")
