"""What a worker does, in any process on any machine: a unit of text to files of windows."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flash_tf.data import tokenizers
from flash_tf.data.prepared import Layout
from flash_tf.data.prepared_files import Piece, join_rests, write_unit
from flash_tf.data.sources import SOURCES
from flash_tf.data.token_cache import TokenizedShard, text_batches
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.preparing.encoding import Encoder


@dataclass(frozen=True, kw_only=True)
class Task:
    """Some work of one split: a unit to write, or a file to join from rests of units.

    Attributes:
      split: "train" or "validation".
      number: The number of the unit, or of the joined file.
      unit: The unit's name in the source; None to join.
      pieces: The pieces to join.
      units: The number of all units of the split.
    """

    split: str
    number: int
    unit: str | None = None
    pieces: tuple[Piece, ...] = ()
    units: int = 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all tasks have in common. It travels to the workers.

    Attributes:
      out: The folder of the prepared text, which holds the tokenizer.
      source: The source's options in YAML.
      layout: How a window is stored.
      vocabulary_size: The tokenizer's.
    """

    out: str
    source: dict
    layout: Layout
    vocabulary_size: int

    def do(self, task: Task) -> None:
        """Does a task; another one that does it meanwhile, or did it before, writes the same files."""
        folder = f"{self.out}/{task.split}"
        if task.unit is None:
            join_rests(folder, self.layout, task.units, task.number, task.pieces)
            return
        shard = tokenized(self._source.documents(task.split, task.unit), self._tokenizer, self._encoder, self._words)
        write_unit(
            folder, self.layout, task.number, task.unit, shard, self._tokenizer, pad_last=task.split == "validation"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The attributes alone: each process makes its own source and tokenizer."""
        return {name: vars(self)[name] for name in self.__dataclass_fields__}

    @cached_property
    def _source(self):
        return SOURCES.build(self.source)

    @cached_property
    def _tokenizer(self):
        return tokenizers.load(self.out, self.vocabulary_size)

    @cached_property
    def _encoder(self):
        return Encoder(self._tokenizer)

    @property
    def _words(self):
        return self._source.counts_words


def tokenized(documents: Iterable[str], tokenizer: Tokenizer, encoder: Encoder, counts_words: bool) -> TokenizedShard:
    """The documents as `TokenCache` stores them, in a temporary file that goes with the result.

    Args:
      documents: Texts. Some MB of them are in memory at a time.
      tokenizer: Gives `eos_id` and the vocabulary size.
      encoder: The tokenizer's.
      counts_words: Whether to count words; else they are None.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.int32)
    lengths, words, size = [np.zeros(1, np.int64)], 0, 0
    with tempfile.TemporaryFile() as file:
        for texts in text_batches(documents):
            ids, counts = encoder(texts)
            counts = counts[counts > 0]
            file.write(np.insert(ids, np.cumsum(counts), tokenizer.eos_id).astype(dtype))
            lengths.append(counts + 1)
            size += sum(len(text.encode("utf-8", "replace")) for text in texts)
            words += sum(len(text.split()) for text in texts) if counts_words else 0
        file.flush()
        offsets = np.cumsum(np.concatenate(lengths))
        tokens = np.memmap(file, dtype, "r") if offsets[-1] else np.zeros(0, dtype)
    return TokenizedShard(tokens=tokens, offsets=offsets, words=words if counts_words else None, bytes=size)
