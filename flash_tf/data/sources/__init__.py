"""Where documents come from, one file a source, chosen by `type` in YAML."""

from collections.abc import Iterator
from typing import Protocol

from flash_tf.registry import Registry

SOURCES = Registry("source", folder=__name__)


class Source(Protocol):
    """What every source offers.

    Attributes:
      counts_words: Whether perplexity is also reported per word of the original text, as PG-19 and WikiText are.
    """

    counts_words: bool

    def shards(self, split: str) -> list[str]:
        """Stable names of the pieces of `split` ("train" or "validation"), in a fixed order, never empty.

        A piece is what is tokenised at a time, a few to some tens of MB of text. Raises ValueError naming the split,
        what was needed and what came when there is nothing to read.
        """

    def documents(self, split: str, shard: str) -> Iterator[str]:
        """The documents of one piece, always in the same order."""

    def identity(self) -> dict:
        """What decides the text (name, version, files and their sizes): two sources with equal ones read the same."""
