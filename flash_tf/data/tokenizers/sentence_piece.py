"""SentencePiece models, of any type."""

import io
import re
import tempfile
from collections.abc import Iterator
from itertools import chain
from typing import Literal

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from flash_tf.data import visible
from flash_tf.data.tokenizer import CLS, MASK, SPACES, Tokenizer
from flash_tf.data.tokenizers import sampling

# Not after "▁": the normalizer strips it from the end of a text as if it were a space.
CHUNK = re.compile(r"(?s).{1024,}?(?<!▁)[ \n]|.+")
WHOLE = re.compile(r"(?s).+")
CHUNKS_AT_A_TIME = 4096
# A model's normalizer has this name if its texts go through `flash_tf.data.visible` first.
KEEPS_WHITESPACE = "flash_tf_visible"
BYTES_FROM = 1000  # pieces; a smaller vocabulary has a piece for each character of the sample, not for each byte

VISIBLE = {
    "model_type": "unigram",
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "character_coverage": 1.0,
    "required_chars": "".join(visible.BYTES),
}
# As Llama's and Mistral's models.
KEPT = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}
SPECIAL = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "control_symbols": [MASK, CLS]}

_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece


class SentencePiece(Tokenizer):
    """A SentencePiece model: unigram, BPE, word or char, with byte fallback or without.

    `<mask>` and `<cls>` are pieces of a model that `train` made. In a model without them, such as T5's, they take the
    last two ids; pad and eos do so too where they are missing. Text with a piece that is lost to them gets `unk_id`; a
    model with byte fallback spells it by other pieces.

    The model decides the normalization. T5's, NFKC, changes characters, and makes every run of blanks and newlines one
    blank. A model that `train` made changes no character, and with `whitespace="keep"` no white space: `decode` then
    gives exactly the text that `encode` read.

    Attributes:
      graph_model: The bytes of the model for an operator of TF-Text, without the pieces that are lost.
      fast: Whether TF-Text's `FastSentencepieceTokenizer` reads the model as SentencePiece itself does.
      spaced: Whether the model collapses white space, and no piece crosses a blank.
      visibly: Whether texts go through `flash_tf.data.visible` first.
      strips: Whether the ends of a decoded text are stripped.
      prefixed: Whether a blank is put before a text.
    """

    file = "tokenizer.model"

    def __init__(self, model: bytes, *, vocabulary_size: int | None = None, where: str = "the tokenizer model"):
        """Takes the bytes of a `.model` file; ValueError, naming `where`, if they cannot be used."""
        proto = _parsed(model, where)
        pieces = [piece.piece for piece in proto.pieces]
        plain = sentencepiece.SentencePieceProcessor(model_proto=model)
        found = {name: id for name in ("pad", "eos", "unk") if (id := getattr(plain, f"{name}_id")()) >= 0}
        if MASK in pieces and CLS in pieces:
            found |= {"mask": pieces.index(MASK), "cls": pieces.index(CLS)}
        super().__init__(model, pieces, found, vocabulary_size, where)
        trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
        self.visibly = normalizer.name == KEEPS_WHITESPACE
        crossing = any("▁" in piece[1:] for piece in pieces)
        self.spaced = not self.visibly and plain.normalize("a \n b") == "▁a▁b" and not crossing
        self.fast = trainer.model_type == trainer.UNIGRAM and not trainer.byte_fallback
        self.fast = self.fast and (self.visibly or self.spaced)
        self.prefixed = not self.visibly and normalizer.add_dummy_prefix
        self.strips = not self.visibly and normalizer.remove_extra_whitespaces
        self.keeps_whitespace = not self.strips
        for id in self.lost if trainer.byte_fallback else ():
            proto.pieces[id].type, proto.pieces[id].piece = _Piece.CONTROL, f"<lost{id}>"
        self.graph_model = proto.SerializeToString(deterministic=True) if trainer.byte_fallback else model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.graph_model)
        special = list(self.special_ids)
        self.starts_word = np.array([piece.startswith("▁") for piece in self._pieces])
        self.starts_word[special] = True
        self._from_text = np.arange(len(pieces), dtype=np.int32)
        self._from_text[[i for i in special if i < len(pieces)]] = self.unk_id
        self.spelled = self._spelled([piece.type for piece in proto.pieces])

    def _spelled(self, types):
        spelled = [_spelling(piece, kind) for piece, kind in zip(self._pieces, types, strict=False)]
        spelled += [piece.encode() for piece in self._pieces[len(types) :]]
        for i in (self.pad_id, self.eos_id, self.cls_id):
            spelled[i] = b""
        spelled[self.mask_id] = f" {MASK}".encode()
        spelled[self.unk_id] = " ⁇".encode() if self.visibly else " ⁇ ".encode()
        if self.visibly:
            spelled = [piece.replace(b" ", "▁".encode()) for piece in spelled]
            spelled[self.unk_id] = ("▁" + "".join(visible.BYTES[byte] for byte in "⁇".encode())).encode()
        return spelled

    def _prepared(self, texts: list[str]) -> list[str]:
        return _visible(texts) if self.visibly else texts

    def _masked(self, text: str) -> str:
        if self.spaced:
            return text
        blank = "▁" if self.visibly else " "
        text = text.replace(f"{blank}{MASK}", MASK)
        return text.replace(f"{MASK} ", MASK) if self.prefixed else text

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of prepared texts.

        A text is tokenized in chunks of about a thousand characters that end at a blank, which no piece crosses. The
        sum of scores of a longer text, in float32, would be too coarse to choose between two ways to cut a word. If
        white space is spelled visibly, each word is tokenized alone.
        """
        chunk = visible.WORD if self.visibly else CHUNK if self.spaced else WHOLE
        cut = [chunk.findall(text) for text in texts]
        chunks = list(chain.from_iterable(cut))
        ids, lengths = [np.zeros(0, np.int32)], [np.zeros(1, np.int64)]
        for start in range(0, len(chunks), CHUNKS_AT_A_TIME):
            found = self._processor.encode(chunks[start : start + CHUNKS_AT_A_TIME])
            ids.append(self._from_text[np.fromiter(chain.from_iterable(found), np.int32)])
            lengths.append(np.array([len(one) for one in found], np.int64))
        chunk_ends = np.cumsum(np.concatenate(lengths))
        text_ends = chunk_ends[np.cumsum([len(chunks) for chunks in cut], dtype=np.int64)]
        return np.split(np.concatenate(ids), text_ends)[:-1]

    def _finished(self, spelled: bytes) -> str:
        import tensorflow as tf

        if self.visibly:
            spelled = visible.restored(tf.constant([spelled])).numpy()[0]
        text = spelled.decode("utf-8", "replace")
        if self.strips:
            return text.strip(" ")
        return text.removeprefix(" ") if self.prefixed else text


def train(
    documents: Iterator[str],
    vocabulary_size: int,
    whitespace: Literal["collapse", "keep"],
    kind: Literal["unigram", "bpe"],
) -> SentencePiece:
    """Makes a model with byte fallback; see `flash_tf.data.tokenizers.train`.

    A unigram model of `whitespace="keep"` reads text as `flash_tf.data.visible` spells it. 256 of its pieces are bytes.
    A BPE model keeps white space like Llama's: it reads `▁` as a blank.
    """
    keep = whitespace == "keep"
    if keep and kind == "unigram":
        sentences = sampling.sample(
            documents, vocabulary_size, lambda text: visible.SENTENCE.findall(_visible([text])[0])
        )
        return SentencePiece(_named(_learned(sentences, vocabulary_size, VISIBLE)))
    cut = re.compile(r".{1,1000}(?!\S)|.{1,1000}").findall if keep else sampling.sentences
    sentences = sampling.sample(documents, vocabulary_size, cut)
    options = {"model_type": kind, **(KEPT if keep else {})}
    try:
        if kind == "bpe" or vocabulary_size >= BYTES_FROM:  # who asks for this BPE, asks for bytes
            return SentencePiece(_learned(sentences, vocabulary_size, {**options, "byte_fallback": True}))
    except sampling.TooSmallError as error:
        if kind == "bpe" or error.possible >= BYTES_FROM:
            raise
    return SentencePiece(_learned(sentences, vocabulary_size, {**options, "character_coverage": 1.0}))


def _learned(sentences, vocabulary_size, options):
    """The bytes of a model."""
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.writelines(f"{ord(space):X}\t20\n" for space in SPACES if space != " ")
        rules.flush()
        if options.get("normalization_rule_name") != "identity":
            options = {**options, "normalization_rule_tsv": rules.name}
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(_utf8(sentence) for sentence in sentences),
                model_writer=model,
                vocab_size=vocabulary_size,
                shuffle_input_sentence=False,
                num_threads=1,
                minloglevel=2,
                **SPECIAL,
                **options,
            )
        except RuntimeError as error:
            raise _why_training_failed(str(error), vocabulary_size) from None
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    proto.trainer_spec.ClearField("input")  # equal text gives equal bytes
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    return proto.SerializeToString(deterministic=True)


def _parsed(model, where):
    """The model; ValueError if it is none."""
    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    except DecodeError:
        proto = sentencepiece_model_pb2.ModelProto()
    if _Piece.UNKNOWN not in {piece.type for piece in proto.pieces}:
        raise ValueError(f"{where} is no SentencePiece model with an unk piece ({len(model)} bytes)")
    lacking = []
    if proto.normalizer_spec.name == KEEPS_WHITESPACE and not set(visible.BYTES) <= {p.piece for p in proto.pieces}:
        lacking.append("a piece for each byte")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        lacking.append("blanks at the beginning of pieces, not at their end")
    if lacking:
        raise ValueError(f"{where} is not usable: it needs {', '.join(lacking)}")
    return proto


def _spelling(piece, kind):
    """The bytes of a piece, with blanks for "▁"."""
    if kind == _Piece.BYTE:
        return bytes([int(piece[1:-1], 16)])
    return b"" if kind == _Piece.CONTROL else piece.replace("▁", " ").encode()


def _why_training_failed(message, vocabulary_size):
    if possible := re.search(r"too high .*<= (\d+)", message):
        return sampling.TooSmallError(vocabulary_size, int(possible[1]))
    if required := re.search(r"(?:required_chars|smaller than).*?\. \d+ vs (\d+)", message):
        return ValueError(f"{vocabulary_size} pieces are too few for this text: {required[1]} are needed")
    if "sentences_.empty()" in message:
        return ValueError("a tokenizer cannot be trained on no text")
    return ValueError(f"a tokenizer of {vocabulary_size} pieces cannot be trained: {message}")


def _named(model):
    """The model with a name for its normalizer that tells every loader to keep white space."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.normalizer_spec.name = KEEPS_WHITESPACE
    return proto.SerializeToString(deterministic=True)


def _visible(texts):
    import tensorflow as tf

    return [text.decode() for text in visible.visible(tf.constant([_utf8(text) for text in texts], tf.string)).numpy()]


def _utf8(text):
    return text.encode("utf-8", "replace")
