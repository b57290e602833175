"""Sources of documents and of labelled examples, one file each, chosen by `type` in YAML."""

from collections.abc import Iterator
from typing import Any, Protocol

from flash_tf.registry import Registry

SOURCES = Registry("source", folder=__name__)


class Source(Protocol):
    """The interface of every source.

    Attributes:
      counts_words: Whether an evaluation also gives the perplexity per word of the original text, as for PG-19 and
        WikiText.
    """

    counts_words: bool

    def shards(self, split: str) -> list[str]:
        """Stable names of the shards of `split` ("train" or "validation"), in a fixed order, one or more.

        A shard is tokenized as a whole. It has a few to some tens of MB of text.

        Raises:
          ValueError: There is nothing to read. The message names the split, the need and the finding.
        """

    def documents(self, split: str, shard: str) -> Iterator[str]:
        """The documents of one shard, always in the same order."""

    def identity(self) -> dict:
        """What decides the text: name, version, files, sizes. A text that is edited to the same size is not noticed."""


class ExampleSource(Protocol):
    """The interface of a source of labelled examples. A source may have both interfaces.

    Attributes:
      labelled: Whether a causal model gets this source's examples, and not its documents.
      checksums: `split -> list[int]`, which change with the content of the files, so that rows on disk are made anew; a
        source without files has no such attribute.
      words: The words of a source of ids, by which a run's tokenizer spells them; other sources have no such attribute.
    """

    labelled: bool

    def shards(self, split: str) -> list[str]:
        """As for `Source`."""

    def examples(self, split: str, shard: str) -> Iterator[dict[str, Any]]:
        """The examples of one shard, always in the same order, as records with the keys of the file."""

    def identity(self) -> dict:
        """As for `Source`."""
