"""Questions over texts that are longer than a row: rows by a stride, and answers as spans of words."""

import re
import string
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from flash_tf.data.encoders import IGNORED, Keys
from flash_tf.data.packing import Field
from flash_tf.data.rows import Placed, Row, RowEncoder
from flash_tf.data.tokenizer import SPACES

if TYPE_CHECKING:
    from flash_tf.data.tokenizer import Tokenizer

WORD = re.compile(f"[^{SPACES}]+")
QUOTES = "‘’´`"  # that TriviaQA's script takes for punctuation
LEAST = 16  # tokens of a row
NOWHERE = (0, 0)  # the label of a row without an answer: the place of `<cls>`


class SpanEncoder(RowEncoder):
    """A question and a part of its text in a row, `<cls> question <eos> part <eos>`, with the place of the answer.

    The parts of a long text overlap by half, and each is a row. A question keeps a quarter of the row at most. The text
    is encoded word by word, words being what white space divides, so an answer is a span of whole words. The label is
    the first and the last token of the first answer; (0, 0), the place of `<cls>`, in a part without it.

    `answers` is a record of two lists as SQuAD's, `text` and `answer_start`; or a list of names as TriviaQA's aliases.
    The first name that is in the text, without regard to case, punctuation and articles, is then the label, and a text
    without any of them has no label. No answers at all mean a question without an answer.

    Args:
      tokenizer: Gives the ids; None for `texts` alone.
      length: Tokens of a row.
      columns: See `Keys`. The parts are `question`, `context` and `answers`. A context may be a list of texts.
      answerless_rows: The share of rows without an answer that training reads, chosen by a hash of their tokens.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer | None",
        length: int,
        columns: dict[str, str] | None,
        answerless_rows: float = 1.0,
    ):
        self.keys = Keys(columns, "question", "context", "answers")
        self._tokenizer, self._length, self._answerless_rows = tokenizer, length, answerless_rows
        if length < LEAST:
            raise ValueError(
                f"a row with a question needs data.sequence_length of at least {LEAST} tokens, got {length}"
            )

    @property
    def fields(self) -> dict[str, Field]:
        words = Field(self._length, IGNORED)
        return {"tokens": Field(self._length, self._tokenizer.pad_id), "labels": Field(2, IGNORED)} | {
            "words": words,
            "part": Field(1, IGNORED),
        }

    def identity(self) -> dict:
        how = {"length": self._length, "columns": self.keys.columns, "answerless_rows": self._answerless_rows}
        return {"encoder": type(self).__name__, **how}

    def texts(self, placed: Placed) -> list[str]:
        return [self.keys.text(placed, "question"), self.context(placed)]

    def context(self, placed: Placed) -> str:
        """The text of an example."""
        found = self.keys.get(placed, "context")
        if isinstance(found, list) and all(isinstance(one, str) for one in found):
            return "\n\n".join(found)
        return self.keys.text(placed, "context")

    def check(self, placed: Placed) -> None:
        _, context = self.texts(placed)
        answer_span(placed, self.keys.get(placed, "answers"), context, list(WORD.finditer(context)))

    def rows(self, examples: list[Placed], labelled: bool = True) -> Iterator[Row]:
        for one in examples:
            question, context = self.texts(one)
            words = list(WORD.finditer(context))
            span = answer_span(one, self.keys.get(one, "answers"), context, words) if labelled else None
            yield from self._of(question, words, span, labelled)

    def trains(self, row: Row) -> bool:
        """Whether training reads a row: one with an answer, or one of the share of rows without."""
        if tuple(row["labels"]) != NOWHERE:
            return super().trains(row)
        return zlib.crc32(np.asarray(row["tokens"], np.int32).tobytes()) < self._answerless_rows * 2**32

    def _of(self, question, words, span, labelled):
        (asked,), pieces = self._tokenizer.encode([question]), self._tokenizer.encode_words([one[0] for one in words])
        start = [self._tokenizer.cls_id, *asked[: self._length // 4], self._tokenizer.eos_id]
        room = self._length - len(start) - 1
        ids = np.concatenate([np.zeros(0, np.int32), *pieces])
        of_word = np.repeat(np.arange(len(pieces)), [len(one) for one in pieces])
        for part, first in enumerate(range(0, max(1, len(ids) - room // 2), room - room // 2)):
            inside = of_word[first : first + room]
            yield {
                "tokens": [*start, *ids[first : first + room], self._tokenizer.eos_id],
                "words": [*[IGNORED] * len(start), *inside, IGNORED],
                "labels": _label(span, inside, len(start)) if labelled else [IGNORED, IGNORED],
                "part": [part],
            }


def _label(span, inside, offset):
    """The first and the last token of a span of words in a row; `NOWHERE` if not all of it is there."""
    if span == UNKNOWN:
        return [IGNORED, IGNORED]
    if span is None:
        return [*NOWHERE]
    first, last = np.flatnonzero(inside == span[0]), np.flatnonzero(inside == span[1])
    return [int(first[0]) + offset, int(last[-1]) + offset] if len(first) and len(last) else [*NOWHERE]


UNKNOWN = (IGNORED, IGNORED)  # the span of an answer that the text does not hold


def answer_span(placed: Placed, answers: Any, context: str, words: list[re.Match]) -> tuple[int, int] | None:
    """The first and the last word of an example's first answer; None without an answer, `UNKNOWN` if it is not there.

    Raises:
      ValueError: The answers have another form, or one of them does not stand at its place.
    """
    if isinstance(answers, dict):
        return _placed_span(placed, answers, context, words)
    if not isinstance(answers, list | tuple) or not all(isinstance(one, str) for one in answers):
        raise ValueError(
            f"{placed[0]}: answers must be a record with text and answer_start, or a list of strings, got {answers!r}"
        )
    if not len(answers):
        return None
    plain, names = f" {normalized(context, QUOTES)} ", (normalized(name, QUOTES) for name in answers)
    there = next((name for name in names if name and f" {name} " in plain), None)
    return UNKNOWN if there is None else _named_span(there.split(), words)


def _placed_span(placed, answers, context, words):
    texts, starts = (answers.get(key) for key in ("text", "answer_start"))
    lists = all(isinstance(one, list | tuple | np.ndarray) for one in (texts, starts)) and len(texts) == len(starts)
    if not lists or not all(isinstance(text, str) for text in texts) or not all(map(_is_place, starts)):
        raise ValueError(
            f"{placed[0]}: answers need text, a list of strings, and answer_start, as many whole numbers, "
            f"got {answers!r}"
        )
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        if not text or context[start : start + len(text)] != text:
            raise ValueError(
                f"{placed[0]}: answer_start {start} must be the place of {text!r} in the context, which has "
                f"{context[max(0, start) : max(0, start) + len(text)]!r} there"
            )
    if not len(answers["text"]):
        return None
    first, last = int(answers["answer_start"][0]), int(answers["answer_start"][0]) + len(answers["text"][0])
    over = [i for i, word in enumerate(words) if word.start() < last and word.end() > first]
    return (over[0], over[-1]) if over else None


def _is_place(start):
    return isinstance(start, int | np.integer) and not isinstance(start, bool)


def _named_span(name, words):
    """The words of the first place where a name stands, normalized as TriviaQA's script compares texts."""
    plain = [(i, one) for i, word in enumerate(words) for one in normalized(word[0], QUOTES).split()]
    starts = range(len(plain) - len(name) + 1)
    at = next((at for at in starts if all(plain[at + k][1] == one for k, one in enumerate(name))), None)
    return UNKNOWN if at is None else (plain[at][0], plain[at + len(name) - 1][0])


def normalized(text: str, quotes: str = "") -> str:
    """A text in lower case without punctuation, articles and extra white space.

    It is SQuAD's script, which drops punctuation; with `quotes` TriviaQA's, which puts blanks for it, these and `_`.
    """
    text, marks = text.lower(), set(string.punctuation + quotes)
    text = "".join((" " if quotes else "") if c in marks else c for c in text)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
