"""Text datasets that TensorFlow Datasets has prepared."""

import itertools
import os
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from flash_tf.data.sources import SOURCES

PARSED_AT_ONCE = 256  # examples


@SOURCES.register("tfds")
class Tfds:
    """A prepared dataset, on a disk or in a bucket, of documents or labelled examples. Nothing is downloaded.

    Wiki-40B marks the structure of its articles with special words (`_START_ARTICLE_`, `_START_SECTION_`,
    `_START_PARAGRAPH_`, `_NEWLINE_`). A text that begins with such a mark becomes plain text: the title, each paragraph
    on a line, a blank line before each section title.

    Args:
      name: The name in TFDS: `c4/en`, `wiki40b/en:1.3.0`, `pg19`. Without a version it reads the latest one there.
      text_key: The feature that holds a document; `book_text` for PG-19.
      train_split: A TFDS split, which may be a slice: `train[:50%]`.
      validation_split: The same for validation.
      data_dir: The folder in which `name` was prepared; null for the default of TFDS.
      documents_per_shard: Examples in each shard.
      counts_words: Whether an evaluation also gives the perplexity per word.
    """

    def __init__(
        self,
        name: str,
        text_key: str = "text",
        train_split: str = "train",
        validation_split: str = "validation",
        data_dir: str | None = None,
        documents_per_shard: int = 16384,
        counts_words: bool = False,
    ):
        if documents_per_shard < 1:
            raise ValueError(f"source 'tfds' needs documents_per_shard of at least 1, got {documents_per_shard}")
        self.name = name
        self.text_key = text_key
        self.splits = {"train": train_split, "validation": validation_split}
        self.data_dir = data_dir and os.path.expanduser(data_dir)
        self.documents_per_shard = documents_per_shard
        self.counts_words = counts_words

    def shards(self, split: str) -> list[str]:
        """Absolute slices, for example `train[0:16384]`. Reading one does not read the examples after it."""
        step = self.documents_per_shard
        shards = [
            f"{name}[{start}:{min(start + step, to)}]"
            for name, from_, to in self._slices(split)
            for start in range(from_, to, step)
        ]
        if not shards:
            raise ValueError(f"dataset {self.name} needs documents in {split} split {self.splits[split]!r}, has none")
        return shards

    def units(self, split: str) -> list[str]:
        """Slices like the shards', one for each file, so that a unit is read from its first byte to its last."""
        units = []
        for name, from_, to in self._slices(split):
            ends = np.cumsum([0, *self._builder.info.splits[name].shard_lengths])
            inside = ends[(ends > from_) & (ends < to)].tolist()
            units += [f"{name}[{start}:{end}]" for start, end in itertools.pairwise([from_, *inside, to])]
        return units

    def documents(self, split: str, shard: str) -> Iterator[str]:
        self._check_text_key()
        for text in map(_plain, map(_decoded, self._texts(shard))):
            if text.strip():
                yield text

    def _texts(self, shard: str) -> Iterator[bytes]:
        """The texts of a slice, in the order of the dataset.

        TFDS decodes all features of one example at a time, which takes three times as long as to tokenize it.
        """
        import tensorflow as tf
        from tensorflow_datasets.core.file_adapters import FileFormat

        if self._builder.info.file_format is not FileFormat.TFRECORD:
            yield from (example[self.text_key] for example in self._read(shard))
            return
        feature = {self.text_key: tf.io.FixedLenFeature((), tf.string)}
        for file in self._builder.info.splits[shard].file_instructions:
            records = tf.data.TFRecordDataset(file.filename).skip(file.skip).take(file.take).batch(PARSED_AT_ONCE)
            texts = records.map(lambda batch: tf.io.parse_example(batch, feature)[self.text_key])
            try:
                for batch in texts.as_numpy_iterator():
                    yield from batch.tolist()
            except tf.errors.OpError as error:
                raise OSError(f"{file.filename} cannot be read: {_reason(error)}") from None

    def examples(self, split: str, shard: str) -> Iterator[dict[str, Any]]:
        return map(_decoded, self._read(shard))

    def _read(self, shard: str) -> Iterator[dict[str, Any]]:
        import tensorflow as tf
        import tensorflow_datasets as tfds  # slow

        # One file after the other keeps the order of the dataset. TFDS would mix files for speed.
        order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
        try:
            yield from tfds.as_numpy(self._builder.as_dataset(split=shard, shuffle_files=False, read_config=order))
        except tf.errors.OpError as error:
            name = f"{self._builder.info.full_name}, {shard},"
            raise OSError(f"{name} cannot be read: {_reason(error)}") from None

    def identity(self) -> dict:
        info = self._builder.info
        return {
            "dataset": info.full_name,
            "text_key": self.text_key,
            "slices": {split: [list(one) for one in self._slices(split)] for split in self.splits},
            "bytes": {name: one.num_bytes for name, one in info.splits.items()},
        }

    def _slices(self, split: str) -> list[tuple[str, int, int]]:
        """The slices that make a split: name of the TFDS split, first example, last example plus one."""
        import tensorflow_datasets as tfds

        there = self._builder.info.splits
        try:
            slices = tfds.core.ReadInstruction.from_spec(self.splits[split]).to_absolute(there)
        except ValueError as error:
            raise ValueError(f"dataset {self.name} cannot give its {split} split: {error}") from None
        # TFDS writes None for the ends of a split.
        whole = {name: one.num_examples for name, one in there.items()}
        return [(s.splitname, s.from_ or 0, whole[s.splitname] if s.to is None else s.to) for s in slices]

    @cached_property
    def _builder(self) -> Any:
        """The reader of the files. It does not need the code that prepared them, so any version works."""
        import tensorflow as tf
        import tensorflow_datasets as tfds
        from tensorflow_datasets.core import read_only_builder
        from tensorflow_datasets.core.utils import file_utils

        try:
            builder = read_only_builder.builder_from_files(self.name, data_dir=self.data_dir)
        except (tfds.core.DatasetNotFoundError, tf.errors.OpError):
            searched = ", ".join(map(str, file_utils.list_data_dirs(self.data_dir)))
            raise ValueError(
                f"dataset {self.name} is not prepared in {searched}: prepare it there with TFDS or give its data_dir"
            ) from None
        return builder

    def _check_text_key(self):
        import tensorflow_datasets as tfds

        features = self._builder.info.features
        texts = [key for key, feature in features.items() if isinstance(feature, tfds.features.Text)]
        if self.text_key not in texts:
            raise ValueError(
                f"dataset {self.name} has no text_key {self.text_key!r}; its text keys are: {', '.join(texts)}"
            )


def _reason(error) -> str:
    """What TensorFlow says about a file, without the operator."""
    return error.message.rpartition("}} ")[2].partition(" [Op:")[0]


def _decoded(value: Any) -> Any:
    """Bytes as text, also in records and lists. Old datasets hold a few broken bytes, and no run should end at one."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict):
        return {key: _decoded(one) for key, one in value.items()}
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_decoded(one) for one in value]
    return value


def _plain(text: str) -> str:
    """The text with newlines in place of Wiki-40B's marks."""
    if not text.lstrip().startswith("_START_ARTICLE_"):
        return text
    text = re.sub(r"\s*_START_(?:ARTICLE|SECTION)_\s*", "\n\n", text)
    text = re.sub(r"\s*_START_PARAGRAPH_\s*", "\n", text)
    return text.replace("_NEWLINE_", "\n").strip()
