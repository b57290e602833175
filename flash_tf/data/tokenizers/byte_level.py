"""Byte pair encoding of bytes, as of GPT-2 and RoBERTa (Radford et al. 2019)."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from flash_tf.data.tokenizer import MASK, NAMES, SPACES, whole
from flash_tf.data.tokenizers import sampling
from flash_tf.data.tokenizers.hugging_face import HuggingFace

SPECIAL = [NAMES["pad"], NAMES["eos"], "<unk>", NAMES["mask"], NAMES["cls"]]
PIECE = re.compile(r"(?s).{1000}\S*|.+")


def _alphabet():
    """The character of each byte: itself if it is printable, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


ALPHABET = _alphabet()
BYTES = {character: byte for byte, character in ALPHABET.items()}


def _collapse():
    return normalizers.Sequence([normalizers.Replace(tokenizers.Regex(f"[{SPACES}]+"), " "), normalizers.Strip()])


class ByteLevel(HuggingFace):
    """A `tokenizer.json` of byte-level BPE that splits text as GPT-2 does. Every text has pieces.

    Such a model keeps white space, except one that `train` made with `whitespace="collapse"`.

    Attributes:
      collapses: Whether each run of white space becomes one blank, and none stays at the ends.
      prefixed: Whether a blank is put before a text that has none.
      merges: Pairs of pieces that become one, in order.
    """

    @staticmethod
    def reads(spec: dict[str, Any]) -> bool:
        """Whether a file is of this kind."""
        model, splits = spec["model"], spec.get("pre_tokenizer") or {}
        options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
        return (
            "merges" in model
            and not any(model.get(option) for option in options)
            and (splits.get("type"), splits.get("use_regex", True)) == ("ByteLevel", True)
            and (spec.get("normalizer") is None or _collapses(spec))
            and all(token["special"] for token in spec.get("added_tokens") or ())
            and BYTES.keys() <= model["vocab"].keys()
        )

    def _set_up(self, spec):
        self.collapses = _collapses(spec)
        self.prefixed = spec["pre_tokenizer"].get("add_prefix_space", True)
        self._normalizer = self._library.normalizer
        if self.collapses:
            self._library.normalizer = normalizers.Sequence([])
        model = json.loads(self._library.to_str())["model"]
        self.merges = [tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in model["merges"]]
        self.spelled = [_bytes(piece) for piece in self._pieces]
        for i in (self.pad_id, self.eos_id, self.cls_id):
            self.spelled[i] = b""
        self.spelled[self.mask_id] = f" {MASK}".encode()
        if self.unk_id is not None:
            self.spelled[self.unk_id] = "⁇".encode()

    def _prepared(self, texts):
        return [self._normalizer.normalize_str(text) for text in texts] if self.collapses else texts

    def _masked(self, text):
        return text.replace(f" {MASK}", MASK)

    def decode(self, ids):
        return self._finished(b"".join(self.spelled[i] for i in ids))

    def _finished(self, spelled):
        opens = self.prefixed or spelled.startswith(f" {MASK}".encode())
        return (spelled.removeprefix(b" ") if opens else spelled).decode("utf-8", "replace")


def train(documents: Iterator[str], vocabulary_size: int, whitespace: Literal["collapse", "keep"]) -> ByteLevel:
    """Makes a tokenizer; see `flash_tf.data.tokenizers.train`."""
    needed = len(ALPHABET) + len(SPECIAL)
    if vocabulary_size < needed:
        raise ValueError(f"{vocabulary_size} pieces are too few for bytes and special pieces: {needed} are needed")
    text = sampling.sample(documents, vocabulary_size, PIECE.findall)
    library = _plain(models.BPE())
    if whitespace == "collapse":
        library.normalizer = _collapse()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator((whole(one) for one in text), trainer)
    if not text:
        raise ValueError("a tokenizer cannot be trained on no text")
    if (possible := library.get_vocab_size()) < vocabulary_size:
        raise sampling.TooSmallError(vocabulary_size, possible)
    return ByteLevel(library.to_str().encode())


def as_json(vocabulary: bytes, merges: bytes, where: str) -> bytes:
    """A `tokenizer.json` of GPT-2's and RoBERTa's files, `vocab.json` and `merges.txt`."""
    try:
        ids = json.loads(vocabulary)
        lines = [line for line in merges.decode().split("\n") if line and not line.startswith("#version")]
        pairs = [tuple(line.rstrip("\r").split(" ")) for line in lines]
        return _plain(models.BPE(vocab=ids, merges=pairs)).to_str().encode()
    except Exception as error:  # the library raises this very class
        raise ValueError(f"{where} is no vocabulary with merges: {' '.join(str(error).split())}") from None


def _plain(model):
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def _collapses(spec):
    return spec.get("normalizer") == json.loads(_collapse().__getstate__())


def _bytes(piece):
    try:
        return bytes(BYTES[character] for character in piece)
    except KeyError:
        return piece.encode()
