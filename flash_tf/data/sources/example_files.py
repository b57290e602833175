"""Labelled examples in files: JSON lines, tab-separated tables, or Parquet."""

from collections.abc import Iterator

from flash_tf.data.example_formats import Record, checksums, format_of, listed, matching, tab_separated, with_sizes
from flash_tf.data.sources import SOURCES


@SOURCES.register("example_files")
class ExampleFiles:
    """The examples of all files that match the globs, in the order of the globs, and within a glob of the paths.

    The end of a name says the format: `.jsonl`, a JSON object on each line; `.tsv`, a table without quotes, as GLUE's;
    `.parquet`; `.json`, the questions of a file in SQuAD's layout. Text is UTF-8. A shard is a file.

    Args:
      train: A glob or a list of globs. `~` is the home folder.
      validation: The same for the validation split.
      keys: The keys of a table's columns; None if its first line has them. The pairs of the Long-Range Arena's
        retrieval (`new_aan_pairs.*.tsv`) have none: [label, id1, id2, text1, text2].
    """

    labelled = True
    counts_words = False

    def __init__(self, train: str | list[str], validation: str | list[str], keys: list[str] | None = None):
        self.globs = {"train": listed(train), "validation": listed(validation)}
        self.keys = keys

    def shards(self, split: str) -> list[str]:
        found = matching(self.globs[split], split, "example_files")
        for path in found:
            format_of(path)
            if self.keys is not None and not path.endswith(".tsv"):
                raise ValueError(f"source 'example_files' reads keys for the columns of .tsv files alone, got {path}")
        return found

    def examples(self, split: str, shard: str) -> Iterator[Record]:
        return tab_separated(shard, self.keys) if shard.endswith(".tsv") else format_of(shard)(shard)

    def checksums(self, split: str) -> list[int]:
        return checksums(self.shards(split))

    def identity(self) -> dict:
        files = {split: with_sizes(self.shards(split)) for split in self.globs}
        return files if self.keys is None else {**files, "keys": self.keys}
