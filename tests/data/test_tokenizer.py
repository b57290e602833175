import functools
import io
import itertools
import re
import string
import time

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf

from flash_tf.data import visible
from flash_tf.data.sources import SOURCES
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.data.tokenizers import sampling
from flash_tf.data.tokenizers import sentence_piece as module
from flash_tf.data.tokenizers.sentence_piece import SentencePiece
from flash_tf.exporting.readers import TextReader

STRANGE = [
    "",
    "   ",
    "\n\n",
    " a  b\n\n\tc \r\n",
    "\u3000ｆｕｌｌ　ｗｉｄｔｈ",
    "naïve e\u0301 ﬁne ½ ™",
    "zero\u200bwidth a\u00a0b \u2028 soft\u00adhyphen \ufeffmark",
    "😀👩‍👩‍👧 日本語のテキスト العربية",
    "\x01 control \x1c\x85",
    "▁▁ under ▁ a▁b",
    "<mask> <cls> </s> <pad> <unk>",
]


@pytest.fixture(scope="module")
def documents():
    source = SOURCES.build({"type": "python_stdlib"})
    (shard,) = source.shards("validation")
    return list(itertools.islice(source.documents("validation", shard), 20))


@pytest.fixture(scope="module")
def trained(documents):
    return Tokenizer.train(iter(documents), 1000)


def model(texts, vocab_size, **options):
    """A model from elsewhere: SentencePiece's own order of special ids, without mask and cls."""
    written = io.BytesIO()
    defaults = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, vocab_size=vocab_size, **{**defaults, **options}
    )
    return written.getvalue()


@pytest.fixture(scope="module")
def foreign(documents):
    return SentencePiece(model("".join(documents).splitlines(), 600))


@functools.cache
def processor_of(model):
    """Python's SentencePiece of a model: to read one takes longer than to encode a line."""
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def python_ids(tokenizer, text):
    """What Python's SentencePiece says, special ids being unknown to text."""
    ids = processor_of(tokenizer.graph_model).encode(text)
    return [tokenizer.unk_id if i in tokenizer.special_ids else i for i in ids]


@pytest.mark.parametrize("which", ["trained", "foreign"])
def test_ids_are_those_of_sentencepiece(which, documents, request):
    tokenizer = request.getfixturevalue(which)
    texts = STRANGE + [line for document in documents for line in document.splitlines()][:2000]
    encoded = tokenizer.encode(texts)
    assert [ids.dtype for ids in encoded] == [np.int32] * len(texts)
    for text, ids in zip(texts, encoded, strict=True):
        assert ids.tolist() == python_ids(tokenizer, text), text
    assert tokenizer.encode([]) == []
    with pytest.raises(ValueError, match=r"encode needs a list of texts, got one text: \['one text', …\]"):
        tokenizer.encode("one text")


@pytest.mark.parametrize("which", ["trained", "foreign"])
def test_cutting_a_long_text_into_chunks_changes_no_id(which, documents, monkeypatch, request):
    tokenizer = request.getfixturevalue(which)
    texts = ["\n".join(documents)[:20_000], " ".join(STRANGE * 3), "".join(string.printable * 30), "x" * 5000]
    whole = [python_ids(tokenizer, text) for text in texts]
    for size in (8, 1024):
        monkeypatch.setattr(module, "CHUNK", re.compile(module.CHUNK.pattern.replace("1024", str(size))))
        monkeypatch.setattr(module, "CHUNKS_AT_A_TIME", size)
        assert len(module.CHUNK.findall(texts[0])) > 10
        assert ["".join(module.CHUNK.findall(text)) for text in texts] == texts
        assert [ids.tolist() for ids in tokenizer.encode(texts)] == whole


def test_a_novel_as_one_document_takes_seconds(trained, documents):
    text = "".join(documents)
    novel = (text * (5_000_000 // len(text) + 1))[:5_000_000]
    start = time.monotonic()
    (ids,) = trained.encode([novel])
    assert time.monotonic() - start < 20
    assert 1e6 < len(ids) < 5e6


def test_training_gives_exactly_the_pieces_asked_for_and_the_same_ones_again(trained, documents):
    assert trained.vocabulary_size == 1000
    assert [trained.piece(i) for i in range(5)] == ["<pad>", "</s>", "<unk>", "<mask>", "<cls>"]
    assert (trained.special_ids, trained.unk_id) == ((0, 1, 3, 4), 2)
    assert (trained.mask_id, trained.cls_id) == (3, 4)
    assert Tokenizer.train(iter(documents), 1000).fingerprint == trained.fingerprint
    assert Tokenizer.train(iter(documents), 999).fingerprint != trained.fingerprint


def test_training_samples_all_that_it_reads_and_nothing_after(monkeypatch):
    monkeypatch.setattr(sampling, "LEAST", 2_500)
    monkeypatch.setattr(sampling, "PER_PIECE", 0)
    rng = np.random.default_rng(0)

    def endless():  # 200 characters each, so 100 are read
        for i in itertools.count():
            letters = list("abcd" if i < 50 else "efgh" if i < 100 else "wxyz")
            yield "".join("".join(rng.choice(letters, 9)) + "\n" for _ in range(20))

    tokenizer = Tokenizer.train(endless(), 40)
    known = [letter for letter in "abcdefghwxyz" if tokenizer.unk_id not in tokenizer.encode([letter])[0]]
    assert "".join(known) == "abcdefgh"


@pytest.mark.parametrize("documents", [900, 1_100, 1_900, 4_100])
def test_the_sample_has_the_size_asked_for_and_both_of_two_kinds_that_take_turns(documents, monkeypatch):
    monkeypatch.setattr(sampling, "LEAST", 10_000)
    texts = (f"{'pa'[i % 2]}{i:09d}" for i in range(documents))
    found = sampling.sample(texts, 1, lambda text: [text])
    assert abs(len(found) - min(documents, 1_000)) <= 2
    assert abs(sum(text[0] == "p" for text in found) - len(found) / 2) <= 3


def test_long_lines_and_half_surrogates_are_trained_on():
    lines = [" ".join(f"word{i * j % 97}" for i in range(3000)) for j in range(4)]
    tokenizer = Tokenizer.train(iter([*lines, "w" * 9000, "half \ud800"]), 60)
    assert tokenizer.vocabulary_size == 60
    assert tokenizer.encode(["word1 \ud800"])[0].tolist() == tokenizer.encode(["word1 ?"])[0].tolist()


def test_a_text_too_small_for_the_vocabulary_is_an_error_that_says_how_many_pieces_are_possible():
    text = "the owl and the other owl"
    with pytest.raises(ValueError, match="too small for 8000 pieces: [0-9]+ are possible") as error:
        Tokenizer.train(iter([text]), 8000)
    possible = int(str(error.value).split(": ")[1].split()[0])
    assert Tokenizer.train(iter([text]), possible).vocabulary_size == possible
    with pytest.raises(ValueError, match="9 pieces are too few for this text: [0-9]+ are needed"):
        Tokenizer.train(iter([text]), 9)
    for nothing in ([], [" \n"]):
        with pytest.raises(ValueError, match="cannot be trained on no text"):
            Tokenizer.train(iter(nothing), 100)


def test_a_saved_model_is_loaded_as_it_was(trained, tmp_path):
    path = str(tmp_path / "pieces.model")
    trained.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.encode(["def f(x): pass"])[0].tolist() == trained.encode(["def f(x): pass"])[0].tolist()
    with pytest.raises(OSError, match="none/pieces.model cannot be written"):
        trained.save(str(tmp_path / "none" / "pieces.model"))


def test_a_model_without_mask_and_cls_gives_them_its_last_two_ids(foreign):
    size = foreign.vocabulary_size
    assert (size, foreign.mask_id, foreign.cls_id) == (600, 598, 599)
    assert (foreign.piece(598), foreign.piece(599)) == ("<mask>", "<cls>")
    processor = sentencepiece.SentencePieceProcessor(model_proto=foreign.data)
    lost = processor.id_to_piece(599)
    assert 599 in processor.encode(lost)
    ids = foreign.encode([lost])[0].tolist()
    assert foreign.unk_id in ids
    assert 599 not in ids


@pytest.mark.parametrize("which", ["trained", "foreign"])
def test_no_text_yields_a_special_id(which, request):
    tokenizer = request.getfixturevalue(which)
    texts = [tokenizer.piece(i) for i in range(tokenizer.vocabulary_size)] + STRANGE
    assert not set(np.concatenate(tokenizer.encode(texts)).tolist()) & set(tokenizer.special_ids)


def test_a_mask_in_the_text_becomes_the_mask_id_and_reads_as_a_mask_again(trained):
    ids = trained.encode_with_masks("def <mask>(self): <mask>")
    assert ids.dtype == np.int32
    assert np.flatnonzero(ids == trained.mask_id).tolist() == [len(trained.encode(["def"])[0]), len(ids) - 1]
    assert trained.decode(ids) == "def <mask> (self): <mask>"
    assert trained.encode_with_masks("<mask>").tolist() == [trained.mask_id]
    assert trained.encode_with_masks("no mask").tolist() == trained.encode(["no mask"])[0].tolist()


def test_decoding_gives_the_normalized_text_without_special_ids(trained):
    ids = trained.encode(["  class Owl:\n    pass "])[0]
    framed = [trained.cls_id, *ids, trained.eos_id, trained.pad_id]
    assert trained.decode(framed) == trained.decode(ids) == "class Owl: pass"
    assert trained.decode([]) == ""
    assert "⁇" in trained.decode([trained.unk_id])


def test_pieces_that_start_a_word_are_those_with_a_blank_and_the_special_ones(trained):
    assert trained.starts_word.shape == (1000,)
    for i in range(1000):
        assert trained.starts_word[i] == (i in (0, 1, 3, 4) or trained.piece(i).startswith("▁"))
    ids = trained.encode(["import tokenize as t"])[0]
    assert trained.starts_word[ids].sum() == 4


def test_a_tokenizer_outlives_a_new_seed(trained):
    before = trained.encode(["import os"])[0].tolist()
    tf.random.set_seed(1)
    assert trained.encode(["import os"])[0].tolist() == before


def test_a_missing_file_and_one_that_is_no_model_are_errors_that_name_it(tmp_path):
    with pytest.raises(OSError, match="none.model cannot be read"):
        Tokenizer.load(str(tmp_path / "none.model"))
    for content in (b"", b"no model", b"\0" * 99):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(ValueError, match="bad.model is no SentencePiece model"):
            Tokenizer.load(str(tmp_path / "bad.model"))


# Tokenizers that keep white space

SPACED = [
    *STRANGE,
    "\n",
    " ",
    "\r\n",
    "x ",
    " x",
    "  x\t",
    "a b  c\td\r\ne\n\n    f \n",
    "\ta\n\t\tb\n",
    "Ġ Ċ ▁Ġ▁ ĉč ĠĊ",  # the characters that spell white space
    "".join(chr(0x100 + b) for b in range(256)),
    "".join(map(chr, range(256))),
    "\0flash-tf\0",
    "\ufdd0\U0010ffff",
    "def f(x):\n" + "    " * 400 + "y" * 3000 + " \n" * 900,
]


@pytest.fixture(scope="module")
def keeping(documents):
    return Tokenizer.train(iter(documents), 1500, "keep")


def test_text_spelled_in_visible_characters_is_restored_whatever_its_bytes():
    rng = np.random.default_rng(0)
    few = np.frombuffer(" \n\t\rx▁Ġ".encode(), np.uint8)
    texts = [rng.choice(few, rng.integers(12)).tobytes() for _ in range(5000)]
    texts += [rng.integers(0, 256, rng.integers(12), np.uint8).tobytes() for _ in range(5000)]
    texts += [bytes([b]) for b in range(256)]
    spelled = visible.visible(tf.constant(texts))
    assert visible.restored(spelled).numpy().tolist() == texts
    assert len(set(spelled.numpy().tolist())) == len(set(texts))
    assert all(text.decode().isprintable() and " " not in text.decode() for text in spelled.numpy())


def test_a_tokenizer_that_keeps_white_space_gives_back_the_very_text(keeping, documents):
    texts = [*SPACED, *documents]
    encoded = keeping.encode(texts)
    assert not {keeping.unk_id, *keeping.special_ids} & set(np.concatenate(encoded).tolist())
    for text, ids in zip(texts, encoded, strict=True):
        assert keeping.decode(ids) == text
        framed = [keeping.cls_id, *ids, keeping.eos_id, keeping.pad_id]
        assert keeping.decode(framed) == text
    assert keeping.decode([]) == ""
    assert keeping.decode([*encoded[-1], keeping.unk_id]) == texts[-1] + "⁇"


def test_an_exported_graph_reads_and_writes_text_as_a_tokenizer_that_keeps_white_space(keeping, documents, tmp_path):
    reader = TextReader(keeping, 1 << 20)
    served = tf.Module()
    served.read = tf.function(lambda text: reader.read(text, masks=True)[:2], input_signature=[reader.spec])
    served.write = tf.function(reader.write, input_signature=[tf.TensorSpec([None, None], tf.int32)])
    tf.saved_model.save(served, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    masked = ["for i in <mask>(10):\n    <mask>", "<mask><mask>", " <mask> \n", "<mask>\n\n"]
    texts = [text for text in SPACED if text and "<mask>" not in text] + documents[:5] + masked
    want = [keeping.encode_with_masks(text).tolist() for text in texts]
    ids, lengths = loaded.read(tf.constant([text.encode() for text in texts]))
    assert [row[:n].tolist() for row, n in zip(ids.numpy(), lengths.numpy(), strict=True)] == want
    assert [text.decode() for text in loaded.write(ids).numpy()] == [keeping.decode(row) for row in want]
    assert [text.decode() for text in loaded.write(ids).numpy()[: -len(masked)]] == texts[: -len(masked)]


def test_a_mask_takes_the_place_of_the_pieces_of_a_word_and_of_the_blank_before_it(keeping):
    text = "import os\n\ndef f(self, x):\n    return self\n"
    (whole,) = keeping.encode([text])
    for word in ("import", "os", "def", "self", "x", "return"):
        before, after = text.split(word, 1)
        ids = keeping.encode_with_masks(f"{before}<mask>{after}").tolist()
        at = ids.index(keeping.mask_id)
        rest = len(ids) - at - 1
        assert (ids[:at], ids[at + 1 :]) == (whole[:at].tolist(), whole[len(whole) - rest :].tolist())
        assert keeping.decode(whole[at : len(whole) - rest]) == word


def test_a_saved_model_still_keeps_white_space_and_others_do_not(keeping, trained, documents, tmp_path):
    assert (keeping.keeps_whitespace, trained.keeps_whitespace) == (True, False)
    assert Tokenizer.train(iter(documents), 1500, "keep").fingerprint == keeping.fingerprint
    keeping.save(str(tmp_path / "keep.model"))
    loaded = Tokenizer.load(str(tmp_path / "keep.model"))
    assert loaded.keeps_whitespace and loaded.fingerprint == keeping.fingerprint
    assert loaded.encode([documents[0]])[0].tolist() == keeping.encode([documents[0]])[0].tolist()


def test_common_words_of_code_are_one_piece_with_a_blank_or_a_line_before_them(keeping):
    for ids in keeping.encode(["return x", "x return x", "x\n    return x", "x\n\n\nreturn x"]):
        assert "▁return" in [keeping.piece(i) for i in ids]
