"""The kinds of tokenizers, one file each, and the functions that find the kind of a file or a folder."""

import os
from collections.abc import Iterator
from typing import Literal

from etils import epath

from flash_tf.data.tokenizer import Tokenizer
from flash_tf.owned_files import TOKENIZERS

VOCABULARY, MERGES = "vocab.json", "merges.txt"


def load(path: str, vocabulary_size: int | None = None) -> Tokenizer:
    """Reads a tokenizer, local or in a bucket.

    Args:
      path: A SentencePiece model, a `tokenizer.json` of Hugging Face's `tokenizers`, a `vocab.json` with a `merges.txt`
        beside it, or a folder with one of them: a run, a preset, or a published model.
      vocabulary_size: The model's vocabulary size; None for the number of the file's pieces.

    Raises:
      OSError: There is no such file.
      ValueError: It is no tokenizer, or does not fit the vocabulary size.
    """
    path = os.path.expanduser(path)
    if epath.Path(path).is_dir():
        path = _inside(path)
    where = f"tokenizer model {path}"
    folder, name = os.path.split(path)
    if name in (VOCABULARY, MERGES):
        from flash_tf.data.tokenizers.byte_level import as_json

        vocabulary, merges = (_read(os.path.join(folder, one)) for one in (VOCABULARY, MERGES))
        return _of_json(as_json(vocabulary, merges, where), vocabulary_size, where)
    data = _read(path)
    if data.lstrip()[:1] == b"{":
        return _of_json(data, vocabulary_size, where)
    from flash_tf.data.tokenizers.sentence_piece import SentencePiece

    return SentencePiece(data, vocabulary_size=vocabulary_size, where=where)


def find(folder: str) -> str | None:
    """The path of the tokenizer in a run or a preset; None if there is none."""
    paths = (f"{folder}/{name}" for name in TOKENIZERS)
    return next((path for path in paths if epath.Path(path).exists()), None)


def train(
    documents: Iterator[str],
    vocabulary_size: int,
    whitespace: Literal["collapse", "keep"] = "collapse",
    kind: Literal["unigram", "bpe", "word"] = "unigram",
    byte_fallback: bool = False,
) -> Tokenizer:
    """Makes a tokenizer of exactly `vocabulary_size` ids, the same for the same documents.

    Pieces are learned from a sample of 1,000 characters for each piece, 4 million at least, taken evenly from eight
    times as much text. Words are counted in all of it.

    Args:
      documents: Texts.
      vocabulary_size: V.
      whitespace: "collapse" makes every run of blanks and newlines one blank; "keep" keeps them. Words keep the ends of
        lines alone.
      kind: "unigram" (SentencePiece), "bpe" (of bytes, as GPT-2's) or "word" (between blanks).
      byte_fallback: Makes "bpe" one of characters, which spells rare ones by bytes, as Llama's.

    Raises:
      ValueError: The documents hold too few different pieces or words (the message says how many are possible), or more
        different characters than `vocabulary_size`.
    """
    if kind == "word":
        from flash_tf.data.tokenizers.word_level import train
    elif kind == "bpe" and not byte_fallback:
        from flash_tf.data.tokenizers.byte_level import train
    else:
        from flash_tf.data.tokenizers import sentence_piece

        return sentence_piece.train(documents, vocabulary_size, whitespace, kind)
    return train(documents, vocabulary_size, whitespace)


def _of_json(data, vocabulary_size, where):
    from flash_tf.data.tokenizers.byte_level import ByteLevel
    from flash_tf.data.tokenizers.hugging_face import HuggingFace, parsed
    from flash_tf.data.tokenizers.word_level import WordLevel

    spec = parsed(data, where)
    kind = next((kind for kind in (ByteLevel, WordLevel) if kind.reads(spec)), HuggingFace)
    return kind(data, vocabulary_size=vocabulary_size, where=where)


def _inside(folder):
    """The path of the tokenizer in any folder."""
    found = find(folder) or f"{folder}/{VOCABULARY}"
    if not epath.Path(found).exists():
        raise ValueError(f"{folder} has no tokenizer: it needs {', '.join(TOKENIZERS)}, or {VOCABULARY} and {MERGES}")
    return found


def _read(path):
    try:
        return epath.Path(path).read_bytes()
    except Exception as error:  # of the disk, or of a bucket's client
        reason = f"{path}; {error.strerror}" if getattr(error, "strerror", None) else " ".join(str(error).split())
        raise OSError(f"tokenizer model {path} cannot be read: {reason}") from None
