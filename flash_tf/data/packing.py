"""How the tokens of a shard become windows of one length."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from flash_tf.data.token_cache import TokenizedShard

if TYPE_CHECKING:
    from flash_tf.data.tokenizer import Tokenizer

Kind = Literal["concatenate", "documents"]


class Windows:
    """Rows of one width over a shard's tokens; a row is made when it is read.

    A row holds one or more pieces: runs of consecutive tokens. Place -1 stands before the shard's first token.

    Args:
      tokens: `[t]`, the shard's.
      starts: int64 `[p]`, the place of each piece's first token.
      lengths: int64 `[p]`, at least 1.
      opens: bool `[p]`, the pieces whose first token is `opening_id`, whatever stands at its place.
      columns: int64 `[p]`, where in its row each piece starts.
      rows: int64 `[w + 1]`; row i holds the pieces `rows[i]` to `rows[i + 1] - 1`.
      opening_id: What begins a document or the stream.
      pad_id: What fills the columns that no piece takes.
      sequence_length: n, the positions that a model sees.
      overlap: 1 when a piece's first token is only context, predicted elsewhere or never; the width is n + overlap.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        starts: np.ndarray,
        lengths: np.ndarray,
        opens: np.ndarray,
        columns: np.ndarray,
        rows: np.ndarray,
        opening_id: int,
        pad_id: int,
        sequence_length: int,
        overlap: int,
    ):
        self._tokens = tokens
        self._starts, self._lengths, self._opens = starts, lengths, opens
        self._columns, self._rows = columns, rows
        self._opening_id, self._pad_id = opening_id, pad_id
        self._width, self._overlap = sequence_length + overlap, overlap

    def __len__(self) -> int:
        return len(self._rows) - 1

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        """The rows `indices`, int32 `[k, n + overlap]`."""
        piece, row = self._pieces(indices)
        cell, within = self._cells(piece, row)
        place = np.repeat(self._starts[piece], self._lengths[piece]) + within
        out = np.full((len(indices), self._width), self._pad_id, np.int32)
        out.flat[cell] = self._tokens[np.maximum(place, 0)]
        opened = self._opens[piece]
        out[row[opened], self._columns[piece[opened]]] = self._opening_id
        return out

    def segment_ids(self, indices: np.ndarray) -> np.ndarray:
        """For the rows `indices`, 1 in the first piece, 2 in the next, 0 in padding: int32 `[k, n + overlap]`."""
        piece, row = self._pieces(indices)
        cell, _ = self._cells(piece, row)
        out = np.zeros((len(indices), self._width), np.int32)
        out.flat[cell] = np.repeat(piece - self._rows[indices][row] + 1, self._lengths[piece])
        return out

    def text_tokens(self, count: int) -> int:
        """How many tokens of text (eos included, openings and repetitions not) the first `count` rows hold."""
        pieces = self._rows[count]
        context = pieces if self._overlap else self._opens[:pieces].sum()
        return int(self._lengths[:pieces].sum() - context)

    def _pieces(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of the rows asked for, and the number in `indices` of the row of each."""
        first = self._rows[indices]
        counts = self._rows[np.asarray(indices) + 1] - first
        return np.repeat(first, counts) + _count_up(counts), np.repeat(np.arange(len(indices)), counts)

    def _cells(self, piece: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each token of each piece goes in the flat result, and its number within the piece."""
        lengths = self._lengths[piece]
        within = _count_up(lengths)
        return np.repeat(row * self._width + self._columns[piece], lengths) + within, within


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The rule by which shards are cut into windows of n + overlap tokens.

    Attributes:
      kind: "concatenate": the shard is one stream, cut every n tokens without regard to documents; with overlap 1
        an eos goes before it, so that its first token is predicted too. "documents": rows hold whole documents,
        packed next-fit in their order; a document is `eos, tokens, eos` with overlap 1 and `cls, tokens, eos` with
        overlap 0, and one longer than a row is cut into several pieces.
      sequence_length: n.
      overlap: 1 for next-token prediction: inputs are `row[:-1]`, targets `row[1:]`, and the last token of a piece is
        the first of the next, so that every token is a target once. 0 for masked tokens.
      align: Documents start at multiples of this position; only "documents" packing has such starts.

    Raises:
      ValueError: For an unknown kind, an overlap other than 0 or 1, or a length or alignment below 1.
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

    def cut(self, shard: TokenizedShard, tokenizer: "Tokenizer", *, keep_partial: bool) -> Windows:
        """The windows of a shard, in the order of its text.

        Args:
          shard: The tokens.
          tokenizer: Gives `eos_id`, `cls_id` and `pad_id`.
          keep_partial: Whether a concatenated shard's last window, if it is not full, is padded or dropped. Packed
            documents are never dropped.
        """
        documents = self.kind == "documents"
        return Windows(
            shard.tokens,
            **(self._pack(shard) if documents else self._concatenate(shard, keep_partial)),
            opening_id=tokenizer.cls_id if documents and not self.overlap else tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            sequence_length=self.sequence_length,
            overlap=self.overlap,
        )

    def _concatenate(self, shard: TokenizedShard, keep_partial: bool) -> dict[str, np.ndarray]:
        starts, lengths, opens = self._split(np.array([-self.overlap]), np.array([len(shard.tokens) + self.overlap]))
        count = len(starts) if keep_partial else len(shard.tokens) // self.sequence_length
        return {
            "starts": starts[:count],
            "lengths": lengths[:count],
            "opens": opens[:count] & (self.overlap == 1),
            "columns": np.zeros(count, np.int64),
            "rows": np.arange(count + 1),
        }

    def _pack(self, shard: TokenizedShard) -> dict[str, np.ndarray]:
        # The place before a document holds the eos of the one before: there the document's own opening is read.
        offsets = np.asarray(shard.offsets)
        starts, lengths, opens = self._split(offsets[:-1] - 1, np.diff(offsets) + 1)
        aligned = -(-lengths // self.align) * self.align
        begins = np.cumsum(aligned) - aligned  # where pieces would start in one endless row
        ends = (begins + lengths).tolist()
        rows, piece = [0], 0
        while piece < len(starts):
            piece = bisect_right(ends, begins[piece] + self.sequence_length + self.overlap, piece)
            rows.append(piece)
        rows = np.array(rows)
        columns = begins - np.repeat(begins[rows[:-1]], np.diff(rows))
        return {"starts": starts, "lengths": lengths, "opens": opens, "columns": columns, "rows": rows}

    def _split(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cuts runs of tokens into pieces no longer than a row: their starts, lengths, and which begin a run."""
        counts = -(-(lengths - self.overlap) // self.sequence_length)
        skipped = _count_up(counts) * self.sequence_length
        rest = np.repeat(lengths, counts) - skipped
        return np.repeat(starts, counts) + skipped, np.minimum(rest, self.sequence_length + self.overlap), skipped == 0


def _count_up(counts: np.ndarray) -> np.ndarray:
    """`[0, 1, …, counts[0] - 1, 0, 1, …, counts[1] - 1, …]`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
