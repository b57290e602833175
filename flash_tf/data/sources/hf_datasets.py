"""Labelled examples of Hugging Face `datasets` on a disk."""

import functools
import os
from collections.abc import Iterator
from typing import Any

from flash_tf.data.sources import SOURCES


@SOURCES.register("hf_datasets")
class HfDatasets:
    """The examples of a `DatasetDict` that `save_to_disk` wrote; needs the package `datasets`. Nothing is downloaded.

    Args:
      path: The folder.
      train_split: The name of the split for training.
      validation_split: The same for validation.
      examples_per_shard: Examples in each shard.
    """

    labelled = True
    counts_words = False

    def __init__(
        self,
        path: str,
        train_split: str = "train",
        validation_split: str = "validation",
        examples_per_shard: int = 16384,
    ):
        if examples_per_shard < 1:
            raise ValueError(f"source 'hf_datasets' needs examples_per_shard of at least 1, got {examples_per_shard}")
        self.path = os.path.expanduser(path)
        self.splits = {"train": train_split, "validation": validation_split}
        self.examples_per_shard = examples_per_shard

    def shards(self, split: str) -> list[str]:
        """Slices, for example `train[0:16384]`: a cache of shards of another size does not count."""
        count, name, step = len(self._split(split)), self.splits[split], self.examples_per_shard
        return [f"{name}[{start}:{min(start + step, count)}]" for start in range(0, count, step)]

    def examples(self, split: str, shard: str) -> Iterator[dict[str, Any]]:
        start, end = map(int, shard.rpartition("[")[2].removesuffix("]").split(":"))
        found = self._split(split)
        for index in range(start, end):
            yield found[index]

    def identity(self) -> dict:
        prints = {split: self._split(split)._fingerprint for split in self.splits}
        return {"path": self.path, "splits": self.splits, "fingerprints": prints}

    def _split(self, split: str) -> Any:
        name, found = self.splits[split], self._dataset
        if name not in found:
            raise ValueError(
                f"the dataset {self.path} has no {split} split {name!r}; its splits are: {', '.join(found)}"
            )
        return found[name]

    @functools.cached_property
    def _dataset(self) -> Any:
        try:
            import datasets
        except ModuleNotFoundError:
            raise ImportError("source 'hf_datasets' needs the package datasets: pip install datasets") from None
        try:
            try:
                found = datasets.load_from_disk(self.path)
            except IndexError:  # of an empty split, which may be one that is not asked for
                found = {name: datasets.load_from_disk(f"{self.path}/{name}") for name in self.splits.values()}
        except (OSError, ValueError, IndexError) as error:  # it is not there, damaged or empty
            raise ValueError(f"source 'hf_datasets' needs a folder of save_to_disk, got {self.path}: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"source 'hf_datasets' needs a DatasetDict with splits, got {self.path} with one split")
        return found
