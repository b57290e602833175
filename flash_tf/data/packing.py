"""Cuts the tokens of a shard into windows of one length."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from flash_tf.data.token_cache import TokenizedShard

if TYPE_CHECKING:
    from flash_tf.data.token_cache import TokenCache
    from flash_tf.data.tokenizer import Tokenizer

Kind = Literal["concatenate", "documents"]
Batch = dict[str, np.ndarray]


class Field(NamedTuple):
    """One array of a window or row, of one length in all of them.

    Attributes:
      length: Its length.
      padding: Fills what is missing at its end, and rows that only fill a batch.
      dtype: Its NumPy type.
    """

    length: int
    padding: float
    dtype: type = np.int32


class Windows:
    """The windows of a shard, all of one width. A window is made when it is read.

    A window holds one or more segments: runs of consecutive tokens. Place -1 stands before the shard's first token.

    Args:
      tokens: `[t]`, the shard's tokens.
      starts: int64 `[s]`, the place of each segment's first token.
      lengths: int64 `[s]`, each segment's length, at least 1.
      opens: bool `[s]`, the segments whose first token is `opening_id` in place of the token at its place.
      columns: int64 `[s]`, the column of its window where each segment starts.
      bounds: int64 `[w + 1]`; window i holds the segments `bounds[i]` to `bounds[i + 1] - 1`.
      opening_id: The token that begins a document or the stream.
      pad_id: The token that fills columns without a segment.
      sequence_length: n, the positions that a model sees.
      overlap: 1 if a segment's first token is only context, and predicted elsewhere or never; else 0. The width is
        n + overlap.
      segmented: Whether a batch has `segment_ids`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        starts: np.ndarray,
        lengths: np.ndarray,
        opens: np.ndarray,
        columns: np.ndarray,
        bounds: np.ndarray,
        opening_id: int,
        pad_id: int,
        sequence_length: int,
        overlap: int,
        segmented: bool,
    ):
        self._tokens = tokens
        self._starts, self._lengths, self._opens = starts, lengths, opens
        self._columns, self._bounds = columns, bounds
        self._opening_id, self._pad_id = opening_id, pad_id
        self._width, self._overlap, self._segmented = sequence_length + overlap, overlap, segmented

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def read(self, indices: np.ndarray) -> Batch:
        """The windows `indices` as `tokens` and, if documents are packed, `segment_ids`."""
        segments = {"segment_ids": self.segment_ids(indices)} if self._segmented else {}
        return {"tokens": self.tokens(indices), **segments}

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        """The windows `indices`, int32 `[k, n + overlap]`."""
        segment, window = self._segments(indices)
        cell, within = self._cells(segment, window)
        place = np.repeat(self._starts[segment], self._lengths[segment]) + within
        out = np.full((len(indices), self._width), self._pad_id, np.int32)
        out.flat[cell] = self._tokens[np.maximum(place, 0)]
        opened = self._opens[segment]
        out[window[opened], self._columns[segment[opened]]] = self._opening_id
        return out

    def segment_ids(self, indices: np.ndarray) -> np.ndarray:
        """For the windows `indices`, 1 in the first segment, 2 in the next, 0 in padding: int32 `[k, n + overlap]`."""
        segment, window = self._segments(indices)
        cell, _ = self._cells(segment, window)
        out = np.zeros((len(indices), self._width), np.int32)
        out.flat[cell] = np.repeat(segment - self._bounds[indices][window] + 1, self._lengths[segment])
        return out

    def text_tokens(self, count: int) -> int:
        """Tokens of text in the first `count` windows: eos counts, openings and repeated tokens do not."""
        segments = self._bounds[count]
        context = segments if self._overlap else self._opens[:segments].sum()
        return int(self._lengths[:segments].sum() - context)

    def _segments(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The segments of the windows `indices`, and for each the number of its window in `indices`."""
        first = self._bounds[indices]
        counts = self._bounds[np.asarray(indices) + 1] - first
        return np.repeat(first, counts) + _count_up(counts), np.repeat(np.arange(len(indices)), counts)

    def _cells(self, segment: np.ndarray, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each token's place in the flat result, and its number within its segment."""
        lengths = self._lengths[segment]
        within = _count_up(lengths)
        return np.repeat(window * self._width + self._columns[segment], lengths) + within, within


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The rule by which shards are cut into windows of n + overlap tokens.

    Attributes:
      kind: "concatenate": the shard is one stream, cut every n tokens without regard to documents. With overlap 1 an
        eos goes before it, so that its first token is predicted too. "documents": windows hold whole documents, packed
        next-fit in their order. A document is `eos, tokens, eos` with overlap 1 and `cls, tokens, eos` with overlap 0.
        A document longer than a window is cut into several segments.
      sequence_length: n.
      overlap: 1 for next-token prediction: inputs are `window[:-1]`, targets are `window[1:]`, and the last token of a
        segment is the first of the next, so that every token is a target once. 0 for masked tokens.
      align: Packed documents start at multiples of this position.

    Raises:
      ValueError: The kind is unknown, the overlap is not 0 or 1, or the length or alignment is below 1.
    """

    kind: Kind
    sequence_length: int
    overlap: int
    align: int

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            raise ValueError(f"packing must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.overlap not in (0, 1):
            raise ValueError(f"overlap must be 0 (masked) or 1 (next token), got {self.overlap!r}")
        if self.sequence_length < 1 or self.align < 1:
            raise ValueError(
                f"sequence_length and align must be at least 1, got {self.sequence_length} and {self.align}"
            )

    def cut(self, shard: TokenizedShard, tokenizer: "Tokenizer", *, pad_last: bool) -> Windows:
        """The windows of a shard, in the order of its text.

        Args:
          shard: The shard's tokens.
          tokenizer: Gives `eos_id`, `cls_id` and `pad_id`.
          pad_last: Whether a concatenated shard's last window is padded if it is not full, rather than dropped. Packed
            documents are never dropped.
        """
        documents = self.kind == "documents"
        return Windows(
            shard.tokens,
            **(self._pack(shard) if documents else self._concatenate(shard, pad_last)),
            opening_id=tokenizer.cls_id if documents and not self.overlap else tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            sequence_length=self.sequence_length,
            overlap=self.overlap,
            segmented=documents,
        )

    def fields(self, tokenizer: "Tokenizer") -> dict[str, Field]:
        """The arrays of a window."""
        width = self.sequence_length + self.overlap
        segments = {"segment_ids": Field(width, 0)} if self.kind == "documents" else {}
        return {"tokens": Field(width, tokenizer.pad_id), **segments}

    def nothing(self, cache: "TokenCache", pad_last: bool) -> ValueError:
        """The error of a split without a window."""
        needed = 1 if pad_last or self.kind == "documents" else self.sequence_length
        longest = max(len(cache.get(index).tokens) for index in range(len(cache.shards)))
        return ValueError(
            f"the {cache.split} split has no window: it needs a shard of at least {needed} tokens, "
            f"the longest of its {len(cache.shards)} has {longest}"
        )

    def _concatenate(self, shard: TokenizedShard, pad_last: bool) -> dict[str, np.ndarray]:
        starts, lengths, opens = self._cut_runs(np.array([-self.overlap]), np.array([len(shard.tokens) + self.overlap]))
        count = len(starts) if pad_last else len(shard.tokens) // self.sequence_length
        return {
            "starts": starts[:count],
            "lengths": lengths[:count],
            "opens": opens[:count] & (self.overlap == 1),
            "columns": np.zeros(count, np.int64),
            "bounds": np.arange(count + 1),
        }

    def _pack(self, shard: TokenizedShard) -> dict[str, np.ndarray]:
        # A document's opening is read at the place before it, which holds the eos of the document before.
        offsets = np.asarray(shard.offsets)
        starts, lengths, opens = self._cut_runs(offsets[:-1] - 1, np.diff(offsets) + 1)
        aligned = -(-lengths // self.align) * self.align
        begins = np.cumsum(aligned) - aligned  # where segments would start in one endless window
        ends = (begins + lengths).tolist()
        bounds, segment = [0], 0
        while segment < len(starts):
            segment = bisect_right(ends, begins[segment] + self.sequence_length + self.overlap, segment)
            bounds.append(segment)
        bounds = np.array(bounds)
        columns = begins - np.repeat(begins[bounds[:-1]], np.diff(bounds))
        return {"starts": starts, "lengths": lengths, "opens": opens, "columns": columns, "bounds": bounds}

    def _cut_runs(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cuts runs of tokens into segments no longer than a window: their starts, lengths, and which begin a run."""
        counts = -(-(lengths - self.overlap) // self.sequence_length)
        skipped = _count_up(counts) * self.sequence_length
        rest = np.repeat(lengths, counts) - skipped
        return np.repeat(starts, counts) + skipped, np.minimum(rest, self.sequence_length + self.overlap), skipped == 0


def _count_up(counts: np.ndarray) -> np.ndarray:
    """`[0, 1, …, counts[0] - 1, 0, 1, …, counts[1] - 1, …]`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
