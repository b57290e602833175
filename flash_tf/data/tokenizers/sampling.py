"""The text that tokenizers are trained on."""

import re
from collections.abc import Callable, Iterator

PER_PIECE, LEAST = 1_000, 4_000_000  # characters of the sample: 24 million give 32,000 pieces of novels in about 10 s
READ = 8  # times the sample
GOLDEN = (5**0.5 - 1) / 2  # the fractions of its multiples are even in [0, 1), for every second sentence too


def sample(documents: Iterator[str], vocabulary_size: int, cut: Callable[[str], list[str]]) -> list[str]:
    """Sentences, taken evenly from the beginning of the documents, enough for `vocabulary_size` pieces.

    Args:
      documents: Texts; no more are read than are needed.
      vocabulary_size: Number of pieces.
      cut: Gives the sentences of a document.
    """
    wanted = max(LEAST, PER_PIECE * vocabulary_size)
    sentences, size = [], 0
    for document in documents:
        sentences += cut(document)
        size += len(document)
        if size >= READ * wanted:
            break
    share = wanted / max(size, 1)
    return [sentence for i, sentence in enumerate(sentences) if i * GOLDEN % 1 < share]


class TooSmallError(ValueError):
    """The text has only so many `possible` pieces."""

    def __init__(self, vocabulary_size: int, possible: int, what: str = "pieces"):
        super().__init__(f"the text is too small for {vocabulary_size} {what}: {possible} are possible")
        self.possible = possible


def sentences(document: str) -> list[str]:
    """A document's lines, from word to word and of 1,000 characters at most, so that no word is cut.

    The trainer drops sentences of more than 4,192 bytes; 1,000 characters are 4,000 at most.
    """
    return re.findall(r"\S.{0,999}(?!\S)|\S.{0,999}", document)
