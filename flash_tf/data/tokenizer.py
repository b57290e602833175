"""SentencePiece pieces for text, and back."""

import functools
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal

import numpy as np
import sentencepiece
import tensorflow as tf
import tensorflow_text
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from flash_tf.data import visible

MASK, CLS = "<mask>", "<cls>"

# Training reads so many characters, and samples so many of them evenly: 8,000 pieces in about 10 s.
READ_CHARACTERS, SAMPLE_CHARACTERS = 32_000_000, 4_000_000
# The trainer drops sentences of more than 4,192 bytes; 1,000 characters are 4,000 at most. Words stay whole.
SENTENCE = re.compile(r"\S.{0,999}(?!\S)|\S.{0,999}")
# Not after "▁": the normaliser strips it from the end of a text as if it were a space.
CHUNK = re.compile(r"(?s).{1024,}?(?<!▁)[ \n]|.+")
CHUNKS_AT_A_TIME = 4096
# A model's normaliser has this name if its texts go through `flash_tf.data.visible` first.
KEEPS_WHITESPACE = "flash_tf_visible"
# TF-Text 2.19, the last that runs beside Cloud TPU, ends the process at a batch of more than 32,767 ids. SentencePiece
# itself gives the same ids, at three quarters of the speed.
COUNTS_IN_16_BITS = tensorflow_text.__version__.startswith("2.19.")

VISIBLE = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "character_coverage": 1.0,
    "required_chars": "".join(visible.BYTES),
}


class Tokenizer:
    """A SentencePiece unigram model, applied by TF-Text, with the ids that masked language models need.

    `<mask>` and `<cls>` are pieces of a model that `train` made. In a model without them, such as T5's, they take the
    last two ids, whose pieces are lost: text with these pieces gets `unk_id`. No text gets a special id.

    The model decides the normalisation. The usual one, NFKC, makes every run of blanks and newlines one blank, so
    `decode` does not give them back. A model that `train` made with `whitespace="keep"` changes nothing: `decode` gives
    exactly the text that `encode` read, for all characters.

    Attributes:
      keeps_whitespace: Whether the model was made with `whitespace="keep"`.
      vocabulary_size: Number of pieces, V.
      pad_id, eos_id, unk_id, mask_id, cls_id: Ids below V.
      special_ids: pad, eos, mask and cls.
      starts_word: bool `[V]`, whether a piece begins a word ("▁") or is special.
      fingerprint: The same for the same model and special ids.
    """

    def __init__(self, model: bytes, *, where: str = "the tokenizer model"):
        """Takes the bytes of a `.model` file; ValueError, naming `where`, if they cannot be used."""
        pieces = _read_pieces(model, where)
        self._model = model
        self.keeps_whitespace = _keeps_whitespace(model)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        # Faster than Python's (10 MB/s a core against 5 to 7); SentencepieceTokenizer would not survive set_seed.
        self._fast = tensorflow_text.FastSentencepieceTokenizer(model)
        self.vocabulary_size = len(pieces)
        self.pad_id, self.eos_id, self.unk_id = (
            getattr(self._processor, name)() for name in ("pad_id", "eos_id", "unk_id")
        )
        if MASK not in pieces or CLS not in pieces:
            pieces[-2:] = MASK, CLS
        self.mask_id, self.cls_id = pieces.index(MASK), pieces.index(CLS)
        self._pieces = pieces
        special = list(self.special_ids)
        self.starts_word = np.array([piece.startswith("▁") for piece in pieces])
        self.starts_word[special] = True
        self._from_text = np.arange(len(pieces), dtype=np.int32)
        self._from_text[special] = self.unk_id
        self.fingerprint = hashlib.sha256(model + repr(self.special_ids).encode()).hexdigest()

    @property
    def special_ids(self) -> tuple[int, int, int, int]:
        return self.pad_id, self.eos_id, self.mask_id, self.cls_id

    @property
    def model(self) -> bytes:
        """The bytes of the model's file."""
        return self._model

    @classmethod
    def load(cls, path: str) -> "Tokenizer":
        """Reads a `.model` file, local or in a bucket.

        OSError if there is none; ValueError unless it is a unigram model with pad, eos and unk, which TF-Text and
        SentencePiece read alike.
        """
        try:
            with tf.io.gfile.GFile(os.path.expanduser(path), "rb") as file:
                model = file.read()
        except tf.errors.OpError as error:
            raise OSError(f"tokenizer model {path} cannot be read: {error.message}") from None
        return cls(model, where=f"tokenizer model {path}")

    @classmethod
    def train(
        cls, documents: Iterator[str], vocabulary_size: int, whitespace: Literal["collapse", "keep"] = "collapse"
    ) -> "Tokenizer":
        """Makes a model of exactly `vocabulary_size` pieces, the same for the same documents.

        Reads the first 32 million characters and samples 4 million of them.

        Args:
          documents: Texts.
          vocabulary_size: V.
          whitespace: "collapse" makes every run of blanks and newlines one blank. "keep" keeps them all, which suits
            code; 256 of the pieces are then bytes, so that no text has an unknown character.

        Raises:
          ValueError: The documents hold too few different pieces (the message says how many are possible), or more
            different characters than `vocabulary_size`.
        """
        keep = whitespace == "keep"
        sentences, size = [], 0
        for document in documents:
            sentences += visible.SENTENCE.findall(_visible([document])[0]) if keep else SENTENCE.findall(document)
            size += len(document)
            if size >= READ_CHARACTERS:
                break
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(_utf8(s) for s in sentences[:: -(-size // SAMPLE_CHARACTERS) or 1]),
                model_writer=model,
                model_type="unigram",
                vocab_size=vocabulary_size,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                control_symbols=[MASK, CLS],
                shuffle_input_sentence=False,
                num_threads=1,
                minloglevel=2,
                **(VISIBLE if keep else {}),
            )
        except RuntimeError as error:
            raise ValueError(_why_training_failed(str(error), vocabulary_size)) from None
        return cls(_named(model.getvalue()) if keep else model.getvalue())

    def save(self, path: str) -> None:
        """Writes the model's bytes as they were loaded or trained; OSError if `path` cannot be written."""
        try:
            with tf.io.gfile.GFile(os.path.expanduser(path), "wb") as file:
                file.write(self._model)
        except tf.errors.OpError as error:
            raise OSError(f"tokenizer model {path} cannot be written: {error.message}") from None

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, int32 `[length]`, without eos.

        A text is tokenised in chunks of about a thousand characters that end at a blank, which no piece crosses. The
        sum of scores of a longer text, in float32, would be too coarse to choose between two ways to cut a word. If
        white space is kept, each word is tokenised alone.
        """
        return self._encode(_visible(texts) if self.keeps_whitespace else texts)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of texts. If white space is kept, the texts are spelled already."""
        chunk = visible.WORD if self.keeps_whitespace else CHUNK
        cut = [chunk.findall(text) for text in texts]
        chunks = [_utf8(chunk) for chunk in chain.from_iterable(cut)]
        ids, lengths = [np.zeros(0, np.int32)], [np.zeros(1, np.int64)]
        for start in range(0, len(chunks), CHUNKS_AT_A_TIME):
            found, counts = self._tokenize(chunks[start : start + CHUNKS_AT_A_TIME])
            ids.append(self._from_text[found])
            lengths.append(counts)
        chunk_ends = np.cumsum(np.concatenate(lengths))
        text_ends = chunk_ends[np.cumsum([len(chunks) for chunks in cut], dtype=np.int64)]
        return np.split(np.concatenate(ids), text_ends)[:-1]

    def _tokenize(self, chunks: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all chunks one after the other, and the number of ids of each chunk."""
        if COUNTS_IN_16_BITS:
            each = self._processor.encode(chunks)
            return np.fromiter(chain.from_iterable(each), np.int32), np.array([len(ids) for ids in each], np.int64)
        ragged = self._fast.tokenize(tf.constant(chunks))
        return ragged.flat_values.numpy(), ragged.row_lengths().numpy()

    def encode_with_masks(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 `[length]`, in which each literal `<mask>` is `mask_id`.

        A mask includes the blank before it. Text after a `<mask>` begins a word, as after a blank; if white space is
        kept, it does so only after a blank.
        """
        if self.keeps_whitespace:
            text = _visible([text])[0].replace(f"▁{MASK}", MASK)
        first, *rest = self._encode(text.split(MASK))
        mask = np.array([self.mask_id], np.int32)
        return np.concatenate([first, *chain.from_iterable((mask, ids) for ids in rest)])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: a mask reads `<mask>`, an unknown piece `⁇`; pad, eos and cls leave no trace."""
        if self.keeps_whitespace:
            spelled = "".join(self.spelled[i] for i in ids)
            return visible.restored(tf.constant([spelled])).numpy()[0].decode("utf-8", "replace")
        unseen = {self.pad_id, self.eos_id, self.cls_id}
        pieces = [" " + MASK if i == self.mask_id else self._pieces[i] for i in ids if i not in unseen]
        return self._processor.decode_pieces(pieces).strip()

    @functools.cached_property
    def spelled(self) -> list[str]:
        """The text that `decode` writes for each piece, `[V]`, with "▁" for a blank."""
        spelled = list(self._pieces)
        for i in (self.pad_id, self.eos_id, self.cls_id):
            spelled[i] = ""
        spelled[self.mask_id] = f"▁{MASK}"
        spelled[self.unk_id] = _visible([" ⁇"])[0][1:] if self.keeps_whitespace else "▁⁇▁"
        return spelled

    def piece(self, id: int) -> str:
        """The piece in the model's spelling, with "▁" for a leading blank."""
        return self._pieces[id]


def _read_pieces(model: bytes, where: str) -> list[str]:
    """The model's pieces; ValueError if TF-Text's fast tokenizer would fail or silently differ."""
    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    except DecodeError:
        proto = sentencepiece_model_pb2.ModelProto()
    kinds = {piece.type for piece in proto.pieces}
    if sentencepiece_model_pb2.ModelProto.SentencePiece.UNKNOWN not in kinds:
        raise ValueError(f"{where} is no SentencePiece model with an unk piece ({len(model)} bytes)")
    trainer = proto.trainer_spec
    normalized = sentencepiece.SentencePieceProcessor(model_proto=model).normalize("a \n b")
    pieces = [piece.piece for piece in proto.pieces]
    keep = proto.normalizer_spec.name == KEEPS_WHITESPACE
    want = "a▁\n▁b" if keep else "▁a▁b"
    needs = {
        "model_type unigram": trainer.model_type == trainer.UNIGRAM,
        "byte_fallback off": not trainer.byte_fallback,
        f"normalisation of 'a \\n b' to {want!r}": normalized == want,
        "a piece for each byte": not keep or set(visible.BYTES) <= set(pieces),
        "pieces that cross no blank": not any("▁" in piece[1:] for piece in pieces),
        f"a pad piece called {trainer.pad_piece}": trainer.pad_piece in pieces,
        f"an eos piece called {trainer.eos_piece}": trainer.eos_piece in pieces,
    }
    if lacking := [need for need, met in needs.items() if not met]:
        raise ValueError(f"{where} is not usable: it needs {', '.join(lacking)}")
    return pieces


def _why_training_failed(message: str, vocabulary_size: int) -> str:
    if possible := re.search(r"too high .*<= (\d+)", message):
        return f"the text is too small for {vocabulary_size} pieces: {possible[1]} are possible"
    if required := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return f"{vocabulary_size} pieces are too few for the text's characters: {required[1]} are needed"
    if "sentences_.empty()" in message:
        return "a tokenizer cannot be trained on no text"
    return f"a tokenizer of {vocabulary_size} pieces cannot be trained: {message}"


def _keeps_whitespace(model: bytes) -> bool:
    return sentencepiece_model_pb2.ModelProto.FromString(model).normalizer_spec.name == KEEPS_WHITESPACE


def _named(model: bytes) -> bytes:
    """The model with a name for its normaliser that tells every loader to keep white space."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.normalizer_spec.name = KEEPS_WHITESPACE
    return proto.SerializeToString(deterministic=True)


def _visible(texts: list[str]) -> list[str]:
    return [text.decode() for text in visible.visible(tf.constant([_utf8(text) for text in texts], tf.string)).numpy()]


def _utf8(text: str) -> bytes:
    """Bytes of `text`; half a surrogate pair, which JSON may hold, becomes `?`."""
    return text.encode("utf-8", "replace")
