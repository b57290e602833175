"""The interface of every tokenizer. Its kinds are the files of `flash_tf/data/tokenizers`."""

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal

import numpy as np
from etils import epath

MASK, CLS = "<mask>", "<cls>"
SPECIAL = ("pad", "eos", "mask", "cls")
NAMES = {"pad": "<pad>", "eos": "</s>", "mask": MASK, "cls": CLS}
# Unicode's white space.
SPACES = "".join(
    map(
        chr,
        (*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000),
    )
)
ROOM, MULTIPLE = 128, 8  # a vocabulary may be padded to a multiple of 8 by 128 ids at most: 50,257 to 50,304


class Tokenizer:
    """Turns text into ids and back, with the ids that language models need. `load` and `train` make one of some kind.

    The special ids pad, eos, mask and cls are those that the file names. Special ids that it lacks take the last free
    ids of the vocabulary, in this order. A model's vocabulary that is larger than the file's has room for them; in any
    other the last pieces of the file are lost, and text is spelled without them. No text gets a special id.

    Args:
      data: The bytes of the tokenizer's file.
      pieces: The file's pieces, by id.
      found: Ids of pad, eos, unk, mask and cls, as far as the file has them.
      vocabulary_size: V, None for the number of the file's pieces.
      where: The file, for messages.

    Attributes:
      file: The file's name in a run or a preset.
      keeps_whitespace: Whether `decode` gives back the white space that `encode` read.
      vocabulary_size: Number of ids, V.
      pad_id, eos_id, mask_id, cls_id: Ids below V.
      unk_id: The id of text that has no piece; None if all text has pieces.
      special_ids: pad, eos, mask and cls.
      file_pieces: Number of the file's pieces; ids from there on are unused, or special ids that the file lacks.
      lost: Ids of the file's pieces that special ids replace.
      starts_word: bool `[V]`, whether a piece begins a word or is special.
      spelled: The bytes that `decode` writes for each piece, `[V]`.
      fingerprint: The same for the same file and special ids.

    Raises:
      ValueError: The file's pieces do not fit the vocabulary.
    """

    file: str
    keeps_whitespace: bool
    starts_word: np.ndarray
    spelled: list[bytes]

    def __init__(self, data: bytes, pieces: list[str], found: dict[str, int], vocabulary_size: int | None, where: str):
        size = len(pieces) if vocabulary_size is None else vocabulary_size
        padded = 0 <= size - len(pieces) <= ROOM and size % MULTIPLE == 0
        if size != len(pieces) and not padded:
            raise ValueError(
                f"model.vocabulary_size is {size}, but {where} has {len(pieces)} pieces: it fits these, "
                f"or up to {ROOM} more that make a multiple of {MULTIPLE}"
            )
        self.data, self.vocabulary_size, self.file_pieces = data, size, len(pieces)
        missing = [name for name in SPECIAL if name not in found]
        free = (i for i in reversed(range(size)) if i not in found.values())
        ids = {**found, **dict(zip(reversed(missing), free, strict=False))}
        self.lost = sorted(ids[name] for name in missing if ids[name] < len(pieces))
        self._pieces = pieces + [f"<unused{i}>" for i in range(len(pieces), size)]
        for name in missing:
            self._pieces[ids[name]] = NAMES[name]
        self.pad_id, self.eos_id, self.mask_id, self.cls_id = (ids[name] for name in SPECIAL)
        self.unk_id = found.get("unk")
        self.fingerprint = hashlib.sha256(data + repr(self.special_ids).encode()).hexdigest()

    @property
    def special_ids(self) -> tuple[int, int, int, int]:
        return self.pad_id, self.eos_id, self.mask_id, self.cls_id

    @staticmethod
    def load(path: str, vocabulary_size: int | None = None) -> "Tokenizer":
        """Reads a tokenizer of any kind; see `flash_tf.data.tokenizers.load`."""
        from flash_tf.data import tokenizers  # the kinds know this file

        return tokenizers.load(path, vocabulary_size)

    @staticmethod
    def train(
        documents: Iterator[str],
        vocabulary_size: int,
        whitespace: Literal["collapse", "keep"] = "collapse",
        kind: Literal["unigram", "bpe", "word"] = "unigram",
        byte_fallback: bool = False,
    ) -> "Tokenizer":
        """Makes a tokenizer from text; see `flash_tf.data.tokenizers.train`."""
        from flash_tf.data import tokenizers

        return tokenizers.train(documents, vocabulary_size, whitespace, kind, byte_fallback)

    def save(self, path: str) -> None:
        """Writes the file's bytes as they were loaded or trained; OSError if `path` cannot be written."""
        try:
            epath.Path(os.path.expanduser(path)).write_bytes(self.data)
        except Exception as error:  # of the disk, or of a bucket's client
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise OSError(f"tokenizer model {path} cannot be written: {reason}") from None

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, int32 `[length]`, without eos.

        Raises:
          ValueError: `texts` is one text.
        """
        if isinstance(texts, str | bytes):
            raise ValueError(f"encode needs a list of texts, got one text: [{texts[:20]!r}, …]")
        return self._encode(self._prepared([whole(text) for text in texts]))

    def encode_words(self, words: list[str]) -> list[np.ndarray]:
        """The ids of each word of a text, int32 `[length]`, as in the text, where a blank is between two words.

        Args:
          words: Texts without white space.
        """
        return [*self.encode(words[:1]), *self.encode_after_blank(words[1:])] if self.joins else self.encode(words)

    def encode_after_blank(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of texts that follow a blank in a longer one, int32 `[length]`."""
        if not self.joins:
            return self.encode(texts)
        return self._encode([f" {text}" for text in self._prepared([whole(text) for text in texts])])

    @functools.cached_property
    def joins(self) -> bool:
        """Whether the first word of a text has other ids than after a blank, so that it joins the text before it."""
        (a, aa), (b, bb) = self.encode(["a", "a a"]), self.encode(["b", "b b"])
        return not (np.array_equal(aa, [*a, *a]) or np.array_equal(bb, [*b, *b]))

    def encode_with_masks(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 `[length]`, in which each literal `<mask>` is `mask_id`.

        A mask includes the blank before it. Text after a `<mask>` begins a word, as after a blank; if white space is
        kept, it does so only after a blank.
        """
        first, *rest = self._encode(self._masked(self._prepared([whole(text)])[0]).split(MASK))
        mask = np.array([self.mask_id], np.int32)
        return np.concatenate([first, *chain.from_iterable((mask, ids) for ids in rest)])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: a mask reads `<mask>`, an unknown piece `⁇`; pad, eos and cls leave no trace."""
        return self._finished(b"".join(self.spelled[i] for i in ids))

    def piece(self, id: int) -> str:
        """The piece in the file's spelling."""
        return self._pieces[id]

    def _prepared(self, texts: list[str]) -> list[str]:
        """Texts as `_encode` reads them."""
        return texts

    def _masked(self, text: str) -> str:
        """A prepared text in which each `<mask>` includes the blank before it."""
        return text

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of prepared texts."""
        raise NotImplementedError

    def _finished(self, spelled: bytes) -> str:
        """The text whose pieces are spelled one after the other."""
        raise NotImplementedError


def whole(text: str) -> str:
    """The text in which half a surrogate pair, which JSON may hold, is `?`."""
    return text.encode("utf-8", "replace").decode()
