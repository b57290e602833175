"""Windows that `flash-tf prepare` wrote."""

import os
from collections.abc import Iterator
from functools import cached_property

from flash_tf.data.prepared import Prepared
from flash_tf.data.sources import SOURCES


@SOURCES.register("prepared")
class PreparedText:
    """Text that `flash-tf prepare` has tokenized and packed. It needs the tokenizer, n and packing of the run.

    Args:
      path: The folder, local or gs://.
    """

    def __init__(self, path: str):
        self.tokenizer = os.path.expanduser(path).rstrip("/")

    @cached_property
    def prepared(self) -> Prepared:
        """The windows; ValueError if there are none, or not all."""
        return Prepared(self.tokenizer)

    @property
    def counts_words(self) -> bool:
        return self.prepared.counts_words

    def shards(self, split: str) -> list[str]:
        self.prepared.splits[split].check()
        return [split]

    def documents(self, split: str, shard: str) -> Iterator[str]:
        raise ValueError(f"{self.tokenizer} holds windows, and no text of the {split} split")

    def identity(self) -> dict:
        """What decides the windows, whoever prepared them and where."""
        made = self.prepared
        windows = {name: split.windows for name, split in made.splits.items()}
        return {"prepared": made.identity, "tokenizer": made.tokenizer, **made.layout.as_mapping(), "windows": windows}
