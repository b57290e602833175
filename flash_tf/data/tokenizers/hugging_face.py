"""Any `tokenizer.json` of Hugging Face's `tokenizers`, such as Llama's, Mistral's and BERT's."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers

from flash_tf.data.tokenizer import MASK, Tokenizer

# The usual names of special pieces, the likeliest first.
USUAL = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "eos": ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>", "[SEP]"),
    "unk": ("<unk>", "[UNK]"),
    "mask": (MASK, "[MASK]"),
    "cls": ("<cls>", "[CLS]", "<s>", "<bos>", "<|begin_of_text|>"),
}
BEGINS_WORD = ("▁", "Ġ")
PROBE = "  a \n\t b"


class HuggingFace(Tokenizer):
    """A `tokenizer.json`, read by the library itself. Its special pieces in a text are ordinary text.

    Special ids are found by their usual names, `</s>` or `<|endoftext|>` for eos, among the file's special tokens, or
    all pieces if it has none; see `Tokenizer` for others. Text is spelled without pieces that are lost to them.
    """

    file = "tokenizer.json"

    def __init__(self, data: bytes, *, vocabulary_size: int | None = None, where: str = "the tokenizer model"):
        """Takes the bytes of the file; ValueError, naming `where`, if they cannot be used."""
        spec = parsed(data, where)
        library = _library(spec, where)
        ids = library.get_vocab(with_added_tokens=True)
        pieces = [f"<unused{i}>" for i in range(max(ids.values()) + 1)]
        for piece, i in ids.items():
            pieces[i] = piece
        special = {one["content"] for one in spec.get("added_tokens") or () if one.get("special")}
        among = {kind: ids if kind == "unk" or not special else special for kind in USUAL}  # "</s>" may be HTML
        found = {kind: next((ids[n] for n in names if n in among[kind]), None) for kind, names in USUAL.items()}
        found = {kind: i for kind, i in found.items() if i is not None}
        super().__init__(data, pieces, found, vocabulary_size, where)
        self._library = library if not self.lost else _library(_without({pieces[i] for i in self.lost}, spec), where)
        self._from_text = np.arange(len(pieces), dtype=np.int32)
        if self.unk_id is not None:
            self._from_text[[i for i in self.special_ids if i < len(pieces)]] = self.unk_id
        self.starts_word = np.array([self._begins(piece) for piece in self._pieces])
        self.starts_word[list(self.special_ids)] = True
        self._set_up(spec)
        self.keeps_whitespace = self.decode(self.encode([PROBE])[0]) == PROBE

    def _set_up(self, spec: dict[str, Any]) -> None:
        """Finishes the constructor."""
        self._word_pieces = spec["model"].get("type") == "WordPiece"

    def _begins(self, piece):
        return piece.startswith(BEGINS_WORD)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        found = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [self._from_text[np.array(one.ids, np.int32)] for one in found]

    def decode(self, ids: Iterable[int]) -> str:
        unseen, stretches = {self.pad_id, self.eos_id, self.cls_id}, [[]]
        for i in ids:
            if i == self.mask_id:
                stretches.append([])
            elif i not in unseen:
                stretches[-1].append(int(i))
        texts = [self._library.decode(one, skip_special_tokens=False) for one in stretches]
        return texts[0] if len(texts) == 1 else f" {MASK} ".join(text.strip(" ") for text in texts).strip(" ")


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """The content of a file; ValueError unless it can be a `tokenizer.json`."""
    try:
        spec = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict) or "vocab" not in spec["model"]:
        raise ValueError(f"{where} is no tokenizer.json of Hugging Face's tokenizers: it has no model with a vocab")
    return spec


def _library(spec, where):
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises this very class
        raise ValueError(
            f"{where} is no tokenizer.json of Hugging Face's tokenizers: {' '.join(str(error).split())}"
        ) from None
    library.no_padding()
    library.no_truncation()
    library.encode_special_tokens = True
    return library


def _without(lost, spec):
    """The tokenizer without some pieces, and without the merges that make them or need them."""
    model = dict(spec["model"])
    if isinstance(model["vocab"], dict):  # a unigram model has a list, and a piece for unknown text
        model["vocab"] = {piece: i for piece, i in model["vocab"].items() if piece not in lost}
    if "merges" in model:
        pairs = (tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in model["merges"])
        model["merges"] = [list(pair) for pair in pairs if not {*pair, "".join(pair)} & lost]
    added = [one for one in spec.get("added_tokens") or () if one["content"] not in lost]
    return {**spec, "model": model, "added_tokens": added}
