"""From labelled examples to rows: one encoder for each form of a task."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flash_tf.data import pixels
from flash_tf.data.packing import Field
from flash_tf.data.rows import Placed, Row, RowEncoder

if TYPE_CHECKING:
    from flash_tf.data.tokenizer import Tokenizer

IGNORED = -1  # the label of a token or row that does not count


class Keys:
    """Finds the parts of an example in a record.

    Args:
      columns: A part's name -> its key in a record; a dot leads into a nested record, unless the record has the whole
        key. A part that is not named has its own name as key. If any part is named, an optional part that is not does
        not exist.
      parts: The names of the parts.

    Raises:
      ValueError: The columns name another part, or a key is no string.
    """

    def __init__(self, columns: dict[str, str] | None, *parts: str):
        self.columns = columns or {}
        for part, key in self.columns.items():
            if part not in parts or not isinstance(key, str):
                raise ValueError(f"data.columns needs keys, as strings, for {', '.join(parts)}, got {part}: {key!r}")

    def get(self, placed: Placed, part: str) -> Any:
        """A part of an example; ValueError if its key is missing."""
        place, found = placed
        key = self.columns.get(part, part)
        for name in [key] if isinstance(found, dict) and key in found else key.split("."):
            if not isinstance(found, dict) or name not in found:
                keys = ", ".join(map(str, found)) if isinstance(found, dict) else "none"
                raise ValueError(f"{place} has no key {key!r} for {part}; its keys are: {keys}")
            found = found[name]
        return found

    def text(self, placed: Placed, part: str) -> str:
        """A part that must be a string, or an image, which is read as words; see `flash_tf.data.pixels`."""
        found = self.get(placed, part)
        if isinstance(found, np.ndarray) and found.dtype == np.uint8:
            return pixels.as_text(found)
        if not isinstance(found, str):
            raise ValueError(f"{placed[0]}: {part} must be a string, got {found!r}")
        return found

    def has(self, placed: Placed, part: str) -> bool:
        """Whether an example has an optional part."""
        return part in self.columns if self.columns else part in placed[1]


class Label(Protocol):
    """The label of a row.

    Attributes:
      field: Its array.
    """

    field: Field

    def read(self, placed: Placed, value: Any) -> float:
        """The label as a number; ValueError if it is none of the task's."""

    def identity(self) -> list:
        """What decides the number."""


class ClassLabel:
    """A class: its name if the classes have names, which may be numerals, or its number."""

    field = Field(1, IGNORED)

    def __init__(self, classes: int, names: list[str] | None):
        if names is not None and len(names) != classes:
            raise ValueError(f"data.labels must name the {classes} classes of model.classes, got {len(names)} names")
        if names is not None and len(set(names)) < classes:
            raise ValueError(f"data.labels must have a different name for each class, got {', '.join(names)}")
        self._classes, self._names = classes, names

    def identity(self) -> list:
        return [self._classes, self._names]

    def read(self, placed: Placed, value: Any) -> int:
        name = str(value) if isinstance(value, int | np.integer) else value  # of classes "-1", "0" and "1"
        if self._names is not None and isinstance(name, str) and name in self._names:
            return self._names.index(name)
        number = value
        if isinstance(value, str) and value.isdecimal():
            number = int(value)
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < self._classes:
            needed = f"one of {', '.join(self._names)}, or " if self._names else ""
            raise ValueError(
                f"{placed[0]}: label must be {needed}a whole number from 0 to {self._classes - 1}, got {value!r}"
            )
        return int(number)


class NumberLabel:
    """A finite number."""

    field = Field(1, math.nan, np.float32)

    def identity(self) -> list:
        return []

    def read(self, placed: Placed, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= np.finfo(np.float32).max:
            raise ValueError(f"{placed[0]}: label must be a finite number of float32, got {value!r}")
        return number


class TextEncoder(RowEncoder):
    """One text or a pair in a row, `<cls> text <eos>` or `<cls> text <eos> text_b <eos>`, with a label.

    What does not fit is cut off: the longer text of a pair first, until both are of one length.

    Args:
      tokenizer: Gives the ids; None for `texts` alone.
      length: Tokens of a row.
      columns: See `Keys`. The parts are `text`, optionally `text_b`, and `label`.
      label: Reads labels.
    """

    def __init__(self, tokenizer: "Tokenizer | None", length: int, columns: dict[str, str] | None, label: Label):
        self._keys = Keys(columns, "text", "text_b", "label")
        self._tokenizer, self._length, self._label = tokenizer, length, label
        if length < 5:
            raise ValueError(f"a row needs data.sequence_length of at least 5 tokens, got {length}")

    @property
    def fields(self) -> dict[str, Field]:
        return {"tokens": Field(self._length, self._tokenizer.pad_id), "labels": self._label.field}

    def identity(self) -> dict:
        how = {"length": self._length, "columns": self._keys.columns, "label": self._label.identity()}
        return {"encoder": type(self).__name__, **how}

    def texts(self, placed: Placed) -> list[str]:
        parts = ("text", "text_b") if self._keys.has(placed, "text_b") else ("text",)
        return [self._keys.text(placed, part) for part in parts]

    def check(self, placed: Placed) -> None:
        self.texts(placed)
        self._read(placed)

    def _read(self, placed):
        return self._label.read(placed, self._keys.get(placed, "label"))

    def rows(self, examples: list[Placed], labelled: bool = True) -> Iterator[Row]:
        labels = [[self._read(one)] if labelled else [self._label.field.padding] for one in examples]
        texts = [self.texts(one) for one in examples]
        encoded = iter(self._tokenizer.encode([text for both in texts for text in both]))
        for both, label in zip(texts, labels, strict=True):
            yield {**self._arrays([next(encoded) for _ in both]), "labels": label}

    def _arrays(self, parts):
        return {"tokens": self._joined(parts)}

    def _joined(self, parts):
        tokenizer = self._tokenizer
        cut = fitted(parts, self._length - 1 - len(parts))
        return np.concatenate([[tokenizer.cls_id], *([*part, tokenizer.eos_id] for part in cut)])


class TwoTextEncoder(TextEncoder):
    """A pair of texts in two arrays, `<cls> text <eos>` and `<cls> text_b <eos>`, with a label; see `TextEncoder`."""

    @property
    def fields(self) -> dict[str, Field]:
        return {**super().fields, "tokens_b": super().fields["tokens"]}

    def texts(self, placed: Placed) -> list[str]:
        return [self._keys.text(placed, part) for part in ("text", "text_b")]

    def _arrays(self, parts):
        return {"tokens": self._joined(parts[:1]), "tokens_b": self._joined(parts[1:])}


class AnswerEncoder(RowEncoder):
    """A prompt and its answer, `<eos> prompt answer <eos>`, with the tokens of the answer and its end as labels.

    A row has the next token as the label of each token, and `IGNORED` in the prompt. A long prompt loses its beginning.
    An example may have ids in place of texts: `token_ids` and `labels` of one length, the label of each token,
    `IGNORED` where there is none.

    Args:
      tokenizer: Gives the ids; None for `texts` alone.
      length: Tokens of a row.
      columns: See `Keys`. The parts are `prompt` and `answer`.
    """

    def __init__(self, tokenizer: "Tokenizer | None", length: int, columns: dict[str, str] | None):
        self._tokenizer, self._length, self._keys = tokenizer, length, Keys(columns, "prompt", "answer")

    @property
    def fields(self) -> dict[str, Field]:
        return {"tokens": Field(self._length, self._tokenizer.pad_id), "labels": Field(self._length, IGNORED)}

    def identity(self) -> dict:
        return {"encoder": type(self).__name__, "length": self._length, "columns": self._keys.columns}

    def texts(self, placed: Placed) -> list[str]:
        return [] if "token_ids" in placed[1] else [self._keys.text(placed, part) for part in ("prompt", "answer")]

    def check(self, placed: Placed) -> None:
        self.texts(placed)

    def rows(self, examples: list[Placed], labelled: bool = True) -> Iterator[Row]:
        for one in examples:
            yield self._of_ids(one) if "token_ids" in one[1] else self._of_texts(one)

    def prompt(self, placed: Placed, room: int) -> list[int]:
        """The ids of a prompt to go on from, at most `room`: `<eos> prompt`."""
        (prompt,) = self._tokenizer.encode([self._keys.text(placed, "prompt")])
        return [self._tokenizer.eos_id, *prompt[max(0, len(prompt) - room + 1) :].tolist()]

    def _of_ids(self, placed):
        place, example = placed
        tokens, labels = (np.asarray(example.get(part, ())) for part in ("token_ids", "labels"))
        size = self._tokenizer.vocabulary_size
        if tokens.shape != labels.shape or not 0 < len(tokens) <= self._length:
            needed = f"{self._length} token_ids or fewer, and as many labels"
            raise ValueError(f"{place} needs {needed}, got {tokens.shape} and {labels.shape}")
        if tokens.min() < 0 or labels.min() < IGNORED or max(tokens.max(), labels.max()) >= size:
            raise ValueError(f"{place} needs ids from 0 to {size - 1}, and labels from {IGNORED}, got others")
        return {"tokens": tokens, "labels": labels}

    def _of_texts(self, placed):
        before, after = self.texts(placed)
        (prompt,) = self._tokenizer.encode([before])
        blank = before[-1:].isspace() or after[:1].isspace()
        lost = blank and not self._tokenizer.keeps_whitespace
        (answer,) = (self._tokenizer.encode_after_blank if lost else self._tokenizer.encode)([after])
        eos = [self._tokenizer.eos_id]
        room = self._length - 1 - len(answer)
        if not len(answer) or room < 0:
            needed = f"an answer of 1 to {self._length - 1} tokens"
            raise ValueError(f"{placed[0]} needs {needed}, got {len(answer)}")
        prompt = prompt[max(0, len(prompt) - room) :]
        whole = np.concatenate([eos, prompt, answer, eos])
        labels = np.where(np.arange(1, len(whole)) > len(prompt), whole[1:], IGNORED)
        return {"tokens": whole[:-1], "labels": labels}


def fitted(parts: list[np.ndarray], room: int) -> list[np.ndarray]:
    """One or two texts cut to `room` tokens in all, the longer one first."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first, second = parts
    kept = min(len(second), max(room // 2, room - len(first)))
    return [first[: room - kept], second[:kept]]
