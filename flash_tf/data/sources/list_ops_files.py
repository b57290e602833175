"""ListOps in the Long-Range Arena's files."""

from collections.abc import Iterator

from flash_tf.data import list_ops_words
from flash_tf.data.example_formats import Record, checksums, listed, matching, table_lines, with_sizes
from flash_tf.data.list_ops_words import INDEX
from flash_tf.data.sources import SOURCES

KEYS = ("Source", "Target")
PARENTHESES = ("(", ")")  # the files' own spelling of the trees, which the brackets also say


@SOURCES.register("list_ops_files")
class ListOpsFiles:
    """The expressions of `basic_train.tsv` and its like, tables with the columns `Source` and `Target`.

    The examples are as in `list_ops`, and so are the words: a model reads both. Parentheses are left out, as in the
    arena's own code.

    Args:
      train: A glob or a list of globs. `~` is the home folder.
      validation: The same for the validation split.
    """

    labelled = True
    counts_words = False
    words = list_ops_words.WORDS

    def __init__(self, train: str | list[str], validation: str | list[str]):
        self.globs = {"train": listed(train), "validation": listed(validation)}

    def shards(self, split: str) -> list[str]:
        return matching(self.globs[split], split, "list_ops_files")

    def examples(self, split: str, shard: str) -> Iterator[Record]:
        for number, record in table_lines(shard):
            if missing := [key for key in KEYS if key not in record]:
                raise ValueError(f"{shard} needs the columns {' and '.join(KEYS)}, got no {missing[0]}")
            source, target = (record[key] for key in KEYS)
            words = [word for word in source.split() if word not in PARENTHESES]
            if wrong := [word for word in [*words, target] if word not in INDEX]:
                raise ValueError(f"{shard}, line {number} needs the words of ListOps, got {wrong[0]!r}")
            if not words or not target.isdecimal():
                needed = "an expression as Source and a digit as Target"
                raise ValueError(f"{shard}, line {number} needs {needed}, got {source[:40]!r} and {target!r}")
            yield list_ops_words.example(words, int(target))

    def checksums(self, split: str) -> list[int]:
        return checksums(self.shards(split))

    def identity(self) -> dict:
        return {"list_ops": {split: with_sizes(self.shards(split)) for split in self.globs}}
