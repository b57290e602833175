"""Text datasets that TensorFlow Datasets has prepared."""

import os
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import tensorflow as tf

from flash_tf.data.sources import SOURCES


@SOURCES.register("tfds")
class Tfds:
    """A prepared dataset, on a disk or in a bucket, one document an example. Nothing is downloaded or prepared.

    Wiki-40B marks its articles' structure with words of its own (`_START_ARTICLE_`, `_START_SECTION_`,
    `_START_PARAGRAPH_`, `_NEWLINE_`). A text that begins with such a mark is given as plain text: title, paragraphs one
    a line, a blank line before each section title.

    Args:
      name: As TFDS spells it: `c4/en`, `wiki40b/en:1.3.0`, `pg19`. Without a version the latest one found is read.
      text_key: The feature that holds the text; `book_text` for PG-19.
      train_split: A TFDS split, which may be a slice: `train[:50%]`.
      validation_split: Another.
      data_dir: Folder in which `name` was prepared; null for TFDS's own.
      documents_per_shard: Examples a piece.
      counts_words: Whether perplexity is also reported per word.
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
        """Absolute slices, as `train[0:16384]`: reading one does not read what follows it."""
        step = self.documents_per_shard
        pieces = [
            f"{name}[{start}:{min(start + step, to)}]"
            for name, from_, to in self._slices(split)
            for start in range(from_, to, step)
        ]
        if not pieces:
            raise ValueError(f"dataset {self.name} needs documents in {split} split {self.splits[split]!r}, has none")
        return pieces

    def documents(self, split: str, shard: str) -> Iterator[str]:
        import tensorflow_datasets as tfds  # slow

        # One file after the other: the order of the dataset itself, whatever TFDS thinks best for speed.
        order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
        dataset = self._builder.as_dataset(split=shard, shuffle_files=False, read_config=order)
        for example in tfds.as_numpy(dataset):
            # Old datasets hold a few broken bytes; a run over days should not end at one.
            text = _plain(example[self.text_key].decode("utf-8", "replace"))
            if text.strip():
                yield text

    def identity(self) -> dict:
        info = self._builder.info
        return {
            "dataset": info.full_name,
            "text_key": self.text_key,
            "slices": {split: [list(part) for part in self._slices(split)] for split in self.splits},
            "bytes": {name: part.num_bytes for name, part in info.splits.items()},
        }

    def _slices(self, split: str) -> list[tuple[str, int, int]]:
        """Split name, first and last-plus-one example of each slice of the dataset that `split` stands for."""
        import tensorflow_datasets as tfds

        there = self._builder.info.splits
        try:
            parts = tfds.core.ReadInstruction.from_spec(self.splits[split]).to_absolute(there)
        except ValueError as error:
            raise ValueError(f"dataset {self.name} cannot give its {split} split: {error}") from None
        # TFDS leaves out the ends of a split: None stands for them.
        whole = {name: part.num_examples for name, part in there.items()}
        return [(p.splitname, p.from_ or 0, whole[p.splitname] if p.to is None else p.to) for p in parts]

    @cached_property
    def _builder(self) -> Any:
        """TFDS's reader of the files, found without the code that prepared them, so any version is good."""
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
        texts = [key for key, feature in builder.info.features.items() if isinstance(feature, tfds.features.Text)]
        if self.text_key not in texts:
            raise ValueError(
                f"dataset {self.name} has no text_key {self.text_key!r}; its text keys are: {', '.join(texts)}"
            )
        return builder


def _plain(text: str) -> str:
    """`text` with Wiki-40B's marks turned into newlines, if it has them."""
    if not text.lstrip().startswith("_START_ARTICLE_"):
        return text
    text = re.sub(r"\s*_START_(?:ARTICLE|SECTION)_\s*", "\n\n", text)
    text = re.sub(r"\s*_START_PARAGRAPH_\s*", "\n", text)
    return text.replace("_NEWLINE_", "\n").strip()
