"""Prepared windows as a graph of tf.data, which any host of a cluster runs by itself: no call goes back to Python."""

import tensorflow as tf

from flash_tf.data.prepared import PreparedEvaluation, PreparedSplit
from flash_tf.data.shuffling import base_of, key_of, turned
from flash_tf.data.stream import AHEAD


class PreparedStream:
    """The training windows of a prepared split, as `WindowStream` gives them.

    Args:
      split: The windows.
      seed: Seed of the order; see `PreparedSplit.batch`.
      limit: Number of windows that the run reads in all, from position 0.
    """

    def __init__(self, split: PreparedSplit, *, seed: int, limit: int):
        self._split, self._seed, self._limit = split, seed, limit

    @property
    def failure(self) -> OSError | None:
        """What is wrong with the files, once reading has failed."""
        return self._split.fault()

    def stop(self) -> None:
        """No wait is long here."""

    def dataset(self, position: int, batch_size: int, pipelines: int = 1, pipeline: int = 0) -> tf.data.Dataset:
        """The batches from `position` up to the limit, or one input pipeline's share of each.

        A file is read as a whole, by each pipeline that has a part in it. So a place costs no more than one file.

        Args:
          position: Windows read before, by all pipelines together.
          batch_size: Windows in a global batch.
          pipelines: Input pipelines that share each batch. The first takes the first `batch_size / pipelines` windows.
          pipeline: The number of this pipeline.

        Returns:
          A deterministic dataset of the results of `PreparedSplit.batch`, with static shapes.
        """
        split, share = self._split, batch_size // pipelines
        file = _Files(split)

        @tf.autograph.experimental.do_not_convert
        def read(turn):
            epoch, place = turn // split.files, turn % split.files
            number = file.at(place, key_of(self._seed, epoch))
            within = tf.range(file.count(number))
            at = epoch * split.windows + place * split.layout.windows_per_file + within
            ours = (at >= position) & ((at - position) % batch_size // share == pipeline)
            within, at = tf.boolean_mask(within, ours), tf.boolean_mask(at, ours)
            window = tf.stack([at // split.windows, at % split.windows], axis=-1)
            rows = file.shuffled(within, number, key_of(self._seed, epoch, number + 1))
            return {**file.read(number, rows), "window": tf.cast(window, tf.int32)}

        first, last = (_turn(split, place) for place in (position, max(position, self._limit - 1)))
        steps = (self._limit - position) // batch_size
        turns = tf.data.Dataset.range(first, last + 1)
        windows = turns.map(read).prefetch(1)  # reads a file while the one before is used
        return windows.rebatch(share, drop_remainder=True).take(steps).prefetch(AHEAD)


class PreparedBatches(PreparedEvaluation):
    """The same batches by a graph of tf.data."""

    def dataset(self, pipelines: int = 1, pipeline: int = 0) -> tf.data.Dataset:
        """The batches, or one input pipeline's share of each."""
        split, batch_size, share = self._split, self._batch_size, self._batch_size // pipelines
        file, per_file = _Files(split), split.layout.windows_per_file

        @tf.autograph.experimental.do_not_convert
        def read(number):
            within = tf.range(file.count(number))
            at = number * per_file + within
            ours = (at < self._count) & (at % batch_size // share == pipeline)
            within, at = tf.boolean_mask(within, ours), tf.boolean_mask(at, ours)
            window = tf.stack([tf.zeros_like(at), at], axis=-1)
            return {**file.read(number, within), "window": tf.cast(window, tf.int32)}

        files = tf.data.Dataset.range(-(-self._count // per_file))
        windows = files.map(read).prefetch(1)
        last = self._count - (len(self) - 1) * batch_size  # windows of the last batch
        missing = share - min(max(last - pipeline * share, 0), share)
        return windows.concatenate(self._padding(missing)).rebatch(share, drop_remainder=True)

    def _padding(self, count):
        fields = self._split.layout.fields
        padding = {name: tf.fill([count, one.length], int(one.padding)) for name, one in fields.items()}
        return tf.data.Dataset.from_tensors({**padding, "window": tf.zeros([count, 2], tf.int32)})


class _Files:
    """The files of a split, by operators: which one stands at a place, and its windows."""

    def __init__(self, split: PreparedSplit):
        self._split, self._layout = split, split.layout
        self._first = tf.constant(split.first_files)
        self._rest = split.windows % split.layout.windows_per_file

    def at(self, place, key):
        """The number of the file at a place of an epoch."""
        full = self._split.full
        if full == 0:
            return place
        number = _shuffled(tf.minimum(place, full - 1), full, base_of(full), key)
        return tf.where(place < full, number, full)

    def count(self, number):
        """The windows of a file."""
        return tf.where(number < self._split.full, tf.constant(self._layout.windows_per_file, tf.int64), self._rest)

    def shuffled(self, within, number, key):
        """The windows at some places of a file's order."""
        count = self.count(number)
        full, rest = (tf.constant(base_of(x), tf.int64) for x in (self._layout.windows_per_file, self._rest))
        return _shuffled(within, count, tf.where(number < self._split.full, full, rest), key)

    def read(self, number, within):
        """Some windows of a file: each field int32 `[k, length]`."""
        unit = tf.searchsorted(self._first, number[None], side="right", out_type=tf.int64)[0] - 1
        digits = (
            tf.strings.as_string(unit, width=7, fill="0"),
            tf.strings.as_string(number - self._first[unit], width=5, fill="0"),
        )
        path = tf.strings.join([f"{self._split.directory}/", digits[0], "-", digits[1], ".windows"])
        data = tf.io.decode_raw(tf.io.read_file(path), tf.uint8)
        rows = tf.gather(tf.reshape(data, [self.count(number), self._layout.record.itemsize]), within)
        fields, begin = {}, 0
        for name, field in self._layout.fields.items():
            dtype = tf.as_dtype(field.dtype)
            cells = rows[:, begin : begin + field.length * dtype.size]
            cells = tf.bitcast(tf.reshape(cells, [-1, field.length, dtype.size]), dtype)
            fields[name] = tf.ensure_shape(tf.cast(cells, tf.int32), [None, field.length])
            begin += field.length * dtype.size
        return fields


def _turn(split: PreparedSplit, position: int) -> int:
    """The number of the file that has a window, counted over all epochs."""
    epoch, number = divmod(position, split.windows)
    return epoch * split.files + number // split.layout.windows_per_file


def _shuffled(places, count, base, key):
    """`shuffling.shuffled` by operators."""
    base = tf.cast(base, tf.int64)

    def turn(numbers, outside):
        numbers = tf.where(outside, turned(numbers, base, key), numbers)
        return numbers, numbers >= count

    every = tf.ones_like(places, tf.bool)
    return tf.while_loop(lambda numbers, outside: tf.reduce_any(outside), turn, (places, every))[0]
