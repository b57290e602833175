"""Words between blanks, each with an id, as of WikiText-103."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from flash_tf.data.tokenizer import MASK, MULTIPLE, NAMES, ROOM, SPACES, whole
from flash_tf.data.tokenizers import sampling
from flash_tf.data.tokenizers.hugging_face import HuggingFace

END_OF_LINE = "\n"
WORD = f"[^{SPACES}]+"
SPECIAL = [NAMES["pad"], NAMES["eos"], "<unk>", NAMES["mask"], NAMES["cls"]]


def _split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}


BLANKS, LINES = _split(WORD), _split(f"{END_OF_LINE}|{WORD}")


class WordLevel(HuggingFace):
    """A `tokenizer.json` of words. Other words are `<unk>`. Decoded words have one blank between them.

    Attributes:
      lines: Whether the end of a line is a piece; else it is a blank.
    """

    @staticmethod
    def reads(spec: dict[str, Any]) -> bool:
        """Whether a file is of this kind."""
        return (
            spec["model"].get("type") == "WordLevel"
            and spec.get("pre_tokenizer") in (BLANKS, LINES, {"type": "WhitespaceSplit"})
            and spec.get("normalizer") is None
            and "<unk>" in spec["model"]["vocab"]
            and all(token["special"] for token in spec.get("added_tokens") or ())
        )

    def _set_up(self, spec):
        self.lines = spec["pre_tokenizer"] == LINES
        self.spelled = [piece.encode() if piece == END_OF_LINE else f" {piece}".encode() for piece in self._pieces]
        for i in (self.pad_id, self.eos_id, self.cls_id):
            self.spelled[i] = b""
        self.spelled[self.mask_id] = f" {MASK}".encode()

    def _begins(self, piece):
        return True

    def decode(self, ids):
        return self._finished(b"".join(self.spelled[i] for i in ids))

    def _finished(self, spelled):
        return spelled.replace(b"\n ", b"\n").removeprefix(b" ").decode("utf-8", "replace")


def train(documents: Iterator[str], vocabulary_size: int, whitespace: Literal["collapse", "keep"]) -> WordLevel:
    """Counts the words of all documents, and keeps the most frequent; see `flash_tf.data.tokenizers.train`."""
    pattern = BLANKS if whitespace == "collapse" else LINES
    words, counts = re.compile(pattern["pattern"]["Regex"]), Counter()
    for document in documents:
        counts.update(words.findall(whole(document)))
    if not counts:
        raise ValueError("a tokenizer cannot be trained on no text")
    for name in SPECIAL:
        counts.pop(name, None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    pieces = [*SPECIAL, *ranked[: vocabulary_size - len(SPECIAL)]]
    if len(pieces) + (ROOM if vocabulary_size % MULTIPLE == 0 else 0) < vocabulary_size:
        raise sampling.TooSmallError(vocabulary_size, len(pieces), "words")
    return of_pieces(pieces, vocabulary_size, pattern)


def of_pieces(
    pieces: list[str], vocabulary_size: int, pattern: dict[str, Any] = BLANKS, where: str = "the vocabulary"
) -> WordLevel:
    """A tokenizer of these pieces, which begin with `SPECIAL`; ValueError unless they fit the vocabulary size."""
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pattern,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {piece: i for i, piece in enumerate(pieces)}, "unk_token": "<unk>"},
    }
    return WordLevel(json.dumps(spec, ensure_ascii=False).encode(), vocabulary_size=vocabulary_size, where=where)
