"""Tokenizers of every kind beside SentencePiece's unigram ones: files of others, and those that `train` makes."""

import argparse
import io
import itertools
import json
import random
import re

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
import tokenizers as hugging_face
from sentencepiece import sentencepiece_model_pb2

from flash_tf.commands import export
from flash_tf.data.sources import SOURCES
from flash_tf.data.tokenizer import SPACES, Tokenizer
from flash_tf.data.tokenizers.byte_level import ByteLevel
from flash_tf.data.tokenizers.hugging_face import HuggingFace
from flash_tf.data.tokenizers.sentence_piece import SentencePiece
from flash_tf.data.tokenizers.word_level import WordLevel
from flash_tf.exporting.readers import TextReader
from tests.tiers import thinned

# Name: options of `Tokenizer.train`.
KINDS = {
    "unigram": {},
    "unigram, kept": {"whitespace": "keep"},
    "bytes": {"kind": "bpe", "whitespace": "keep"},
    "bytes, collapsed": {"kind": "bpe"},
    "fallback": {"kind": "bpe", "byte_fallback": True, "whitespace": "keep"},
    "fallback, collapsed": {"kind": "bpe", "byte_fallback": True},
    "words": {"kind": "word", "whitespace": "keep"},
    "words, collapsed": {"kind": "word"},
}
LETTERS = [*SPACES, *"abcTHE'sst''re09!?.,<>日é६ß½\u0301😀\x01\x1cĠ\u00ad\ufeff"]


def random_texts():
    """Texts of white space and letters of all kinds, and of any characters."""
    draw = random.Random(0)
    texts = ["".join(draw.choices(LETTERS, k=draw.randrange(1, 30))) for _ in range(400)]
    ranges = ((1, 0x300), (1, 0x2580), (0xE000, 0x20000))
    return texts + ["".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(15)) for _ in range(200)]


STRANGE = [
    *random_texts(),
    "K X U Q ( ) ‘",
    "",
    " a  b\n\n\tc \r\n",
    "don't we'LL 12345 $%^",
    "<mask> <cls> </s> <pad> <unk> <|endoftext|>",
    "def f(x):\n" + "    " * 90 + "y" * 500 + " \n" * 90,
]


def collapsed(text):
    return re.sub(f"[{SPACES}]+", " ", text).strip(" ")


@pytest.fixture(scope="module")
def documents():
    source = SOURCES.build({"type": "python_stdlib"})
    (shard,) = source.shards("validation")
    return list(itertools.islice(source.documents("validation", shard), 12))


@pytest.fixture(scope="module")
def made(documents):
    """A trained tokenizer of each kind, on demand."""
    trained = {}

    def make(name):
        if name not in trained:
            trained[name] = Tokenizer.train(iter(documents), 1200, **KINDS[name])
        return trained[name]

    return make


def llama(model):
    """The `tokenizer.json` of a SentencePiece BPE model with byte fallback, as Llama's was made of its own."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    vocabulary = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges = [
        (-score.score, piece[:i], piece[i:])
        for piece, score in ((score.piece, score) for score in proto.pieces if score.type == 1)
        for i in range(1, len(piece))
        if piece[:i] in vocabulary and piece[i:] in vocabulary
    ]
    merges = [(a, b) for _, a, b in sorted(merges, key=lambda merge: merge[0])]
    library = hugging_face.Tokenizer(
        hugging_face.models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    of = hugging_face.normalizers
    library.normalizer = of.Sequence([of.Prepend("▁"), of.Replace(" ", "▁")])
    of = hugging_face.decoders
    library.decoder = of.Sequence([of.Replace("▁", " "), of.ByteFallback(), of.Fuse(), of.Strip(" ", 1, 0)])
    return library.to_str()


@pytest.mark.parametrize("name", KINDS)
def test_words_one_by_one_have_the_ids_that_they_have_in_a_text(name, made):
    text, tokenizer = "def found(self): return the first of all words", made(name)
    words = tokenizer.encode_words(text.split(" "))
    assert np.concatenate(words).tolist() == tokenizer.encode([text])[0].tolist()
    in_graph = TextReader(tokenizer, 99).encode_words(tf.constant(text.split(" ")))
    assert in_graph.to_list() == [word.tolist() for word in words]
    read = tokenizer.decode([*tokenizer.encode(["it is"])[0], *tokenizer.encode_after_blank(["Paris"])[0]])
    assert read == tokenizer.decode(tokenizer.encode(["it is Paris"])[0])


@pytest.mark.parametrize("name", KINDS)
def test_what_is_decoded_is_what_was_read(name, made, documents):
    tokenizer = made(name)
    texts = [*STRANGE, *documents] if "words" not in name else documents
    encoded = tokenizer.encode(texts)
    assert not set(tokenizer.special_ids) & set(np.concatenate(encoded).tolist())
    keeps = KINDS[name].get("whitespace") == "keep"
    for text, ids in zip(texts, encoded, strict=True):
        assert ids.dtype == np.int32
        found = tokenizer.decode([tokenizer.cls_id, *ids, tokenizer.eos_id, tokenizer.pad_id])
        if "words" in name:
            known = [word if tokenizer.encode([word])[0][0] != tokenizer.unk_id else "<unk>" for word in text.split()]
            assert found.split() == known
            assert found.count("\n") == (text.count("\n") if keeps else 0)
        else:
            assert found == (text if keeps else collapsed(text))
    assert "words" in name or tokenizer.keeps_whitespace == keeps


@pytest.mark.parametrize("name", ["bytes", "bytes, collapsed", "words", "words, collapsed"])
def test_ids_are_those_of_hugging_faces_library(name, made, documents):
    tokenizer = made(name)
    library = hugging_face.Tokenizer.from_str(tokenizer.data.decode())
    library.encode_special_tokens = True
    lines = [line + "\n" for document in documents for line in document.splitlines()][:1500]
    texts = [text for text in STRANGE if "<pad>" not in text] + lines
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids, text


def test_a_small_bpe_of_characters_spells_by_bytes_too(documents):
    small = Tokenizer.train(iter(documents), 448, "keep", "bpe", byte_fallback=True)
    for text in ("a\n\tb  c", "日本 😀", "x\u0301"):
        assert small.decode(small.encode([text])[0]) == text


def test_a_tokenizer_json_with_byte_fallback_gives_the_ids_and_texts_of_its_sentencepiece_model(made, tmp_path):
    model = made("fallback")
    (tmp_path / "tokenizer.json").write_text(llama(model.data))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert type(tokenizer) is HuggingFace
    assert (tokenizer.special_ids, tokenizer.unk_id) == (model.special_ids, model.unk_id)
    texts = [text for text in STRANGE if text]
    for text, one, other in zip(texts, tokenizer.encode(texts), model.encode(texts), strict=True):
        assert one.tolist() == other.tolist(), text
        assert tokenizer.decode(one) == text
    masked = "def <mask>(self): <mask>"
    assert tokenizer.decode(tokenizer.encode_with_masks(masked)) == "def <mask> (self): <mask>"
    assert (tokenizer.starts_word == model.starts_word).all()


def test_an_export_refuses_any_other_tokenizer_json_before_it_reads_a_weight(made, tmp_path):
    (tmp_path / "tokenizer.json").write_text(llama(made("fallback").data))
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    with pytest.raises(ValueError, match="and no other tokenizer.json: train with the model's tokenizer.model"):
        export.run(parser.parse_args([str(tmp_path), str(tmp_path / "out")]), None)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def check_graph(tokenizer, texts, folder):
    """The operators of an exported tokenizer give the ids and the texts of the tokenizer in Python."""
    served = tf.Module()
    served.reader = reader = TextReader(tokenizer, 1 << 20)
    served.read = tf.function(
        lambda text: reader.read(text, masks=True)[:2], input_signature=[tf.TensorSpec([None], tf.string)]
    )
    served.write = tf.function(reader.write, input_signature=[tf.TensorSpec([None, None], tf.int32)])
    tf.saved_model.save(served, str(folder))
    graph = tf.saved_model.load(str(folder))
    texts = [*texts, *(text[:9] + f" <mask>{text[9:]}<mask> <mask>." for text in texts)]
    encoded = [(text, tokenizer.encode_with_masks(text)) for text in texts]
    encoded = [(text, ids) for text, ids in encoded if len(ids)]
    found, lengths = graph.read(tf.constant([text.encode() for text, _ in encoded]))
    written = graph.write(found).numpy()
    for (text, ids), row, length, back in zip(encoded, found.numpy(), lengths.numpy(), written, strict=True):
        assert row[:length].tolist() == ids.tolist(), text
        assert back.decode() == tokenizer.decode(ids), text
    ids = np.random.default_rng(0).integers(0, tokenizer.vocabulary_size, [100, 9]).astype(np.int32)
    assert [text.decode() for text in graph.write(ids).numpy()] == [tokenizer.decode(row) for row in ids]


@pytest.mark.parametrize("name", thinned(KINDS, "bytes", "words"))
def test_an_exported_graph_gives_the_same_ids_and_texts(name, made, documents, tmp_path):
    lines = [line + "\n" for document in documents for line in document.splitlines()][:200]
    check_graph(made(name), [*STRANGE, *lines, documents[0][:9000]], tmp_path)


FOREIGN = {
    "bpe": {"model_type": "bpe"},
    "bpe with bytes, no pad, no eos": {"model_type": "bpe", "byte_fallback": True, "pad_id": -1, "eos_id": -1},
    "char": {"model_type": "char"},
    "word": {"model_type": "word"},
    "unigram with bytes": {"byte_fallback": True},
    "no eos": {"eos_id": -1},
    "no first blank": {"add_dummy_prefix": False},
    "identity": {"normalization_rule_name": "identity"},
    "blanks kept": {"remove_extra_whitespaces": False},
    "across blanks": {"split_by_whitespace": False},
}


@pytest.mark.parametrize("name", thinned(FOREIGN, "bpe with bytes, no pad, no eos"))
def test_a_sentencepiece_model_of_any_type_gives_its_own_ids_here_and_in_a_graph(name, documents, tmp_path):
    model = io.BytesIO()
    options = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "hard_vocab_limit": False, **FOREIGN[name]}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(documents).splitlines()),
        model_writer=model,
        vocab_size=600,
        minloglevel=2,
        **options,
    )
    tokenizer = SentencePiece(model.getvalue())
    size = tokenizer.vocabulary_size
    missing = [kind for kind in ("pad", "eos") if options[f"{kind}_id"] < 0]
    last = [getattr(tokenizer, f"{kind}_id") for kind in [*missing, "mask", "cls"]]
    assert last == list(range(size - len(last), size)) == tokenizer.lost
    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.data)
    lines = [line for document in documents for line in document.splitlines()][:300]
    for text, ids in zip(lines, tokenizer.encode(lines), strict=True):
        assert not set(ids.tolist()) & set(tokenizer.special_ids)
        if not set(own := library.encode(text)) & set(tokenizer.lost):
            assert ids.tolist() == own
        if "bytes" in name and text.strip():
            assert tokenizer.decode(ids) == library.decode(own), text
    check_graph(tokenizer, [*STRANGE, *lines], tmp_path)


def test_special_ids_that_a_file_lacks_take_the_last_ids_and_text_is_spelled_without_lost_pieces(made, tmp_path):
    spec = json.loads(made("bytes").data)
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] == "</s>"]
    for i, name in enumerate(("<pad>", "<unk>", "<mask>", "<cls>")):  # as GPT-2's, which has an end alone
        spec["model"]["vocab"][f"word{i}"] = spec["model"]["vocab"].pop(name)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    full, roomy = Tokenizer.load(str(path)), Tokenizer.load(str(path), 1248)
    assert (full.special_ids, full.unk_id, full.lost) == ((1197, 1, 1198, 1199), None, [1197, 1198, 1199])
    assert (roomy.special_ids, roomy.lost) == ((1245, 1, 1246, 1247), [])
    assert (roomy.vocabulary_size, roomy.piece(1244), roomy.piece(1247)) == (1248, "<unused1244>", "<cls>")
    texts = [bytes(roomy.spelled[i]).decode() for i in full.lost] + [text for text in STRANGE if text]
    assert any(len(ids) == 1 and ids[0] in full.lost for ids in roomy.encode(texts))
    for one, other, text in zip(full.encode(texts), roomy.encode(texts), texts, strict=True):
        assert full.decode(one) == roomy.decode(other) == text
        assert not set(one.tolist()) & set(full.special_ids)


def test_no_text_has_a_special_id_whatever_the_file_calls_its_pieces(made):
    spec = json.loads(made("bytes").data)
    vocabulary, names = spec["model"]["vocab"], {one["content"] for one in spec["added_tokens"]}
    words = {piece: i for i, piece in enumerate(piece for piece in vocabulary if piece not in names)}
    merges = [pair for pair in spec["model"]["merges"] if not {*pair, "".join(pair)} & names]
    pair = lambda text: [[text[:i], text[i]] for i in range(1, len(text))]  # noqa: E731
    for steps in pair("</s>"):  # HTML that became a piece
        words.setdefault("".join(steps), len(words))
        merges.append(steps)
    added = ["<|endoftext|>", "   ", "    ", "     "]  # runs of blanks are no special tokens
    spec["added_tokens"] = [
        {**spec["added_tokens"][0], "id": len(words) + i, "content": text, "special": not i, "normalized": bool(i)}
        for i, text in enumerate(added)
    ]
    spec["model"] |= {"vocab": words, "merges": merges, "unk_token": None}
    tokenizer = HuggingFace(json.dumps({**spec, "normalizer": None}).encode())
    assert tokenizer.eos_id == len(words) and len(tokenizer.lost) == 3
    for text in ("a</s>b", "def f():\n     return   1"):
        (ids,) = tokenizer.encode([text])
        assert not {*ids.tolist()} & {*tokenizer.special_ids} and tokenizer.decode(ids) == text


def test_a_vocabulary_with_merges_is_read_by_file_or_folder(made, tmp_path):
    model = json.loads(made("bytes").data)["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    want = [ids.tolist() for ids in made("bytes").encode(STRANGE)]
    for path in (tmp_path, tmp_path / "vocab.json", tmp_path / "merges.txt"):
        tokenizer = Tokenizer.load(str(path))
        assert (type(tokenizer), tokenizer.file) == (ByteLevel, "tokenizer.json")
        assert [ids.tolist() for ids in tokenizer.encode(STRANGE)] == want
        assert tokenizer.special_ids == made("bytes").special_ids


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_tokenizer_is_loaded_as_it_was(name, made, tmp_path):
    tokenizer = made(name)
    tokenizer.save(str(tmp_path / tokenizer.file))
    loaded = Tokenizer.load(str(tmp_path))
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.starts_word == tokenizer.starts_word).all()
    assert [ids.tolist() for ids in loaded.encode(STRANGE)] == [ids.tolist() for ids in tokenizer.encode(STRANGE)]


def test_a_word_vocabulary_has_the_commonest_words_of_all_text_and_room_up_to_a_multiple_of_eight():
    texts = ["b a a <unk> \n" + "x " * 100, "late late late late \n", "c"]
    tokenizer = Tokenizer.train(iter(texts), 16, "keep", "word")
    assert [tokenizer.piece(i) for i in range(16)] == [
        *("<pad>", "</s>", "<unk>", "<mask>", "<cls>", "x", "late", "\n", "a", "b", "c"),
        *(f"<unused{i}>" for i in range(11, 16)),
    ]
    assert tokenizer.decode(tokenizer.encode([" a <unk> b \n late  \n zzz \n"])[0]) == "a <unk> b\nlate\n<unk>\n"
    small = Tokenizer.train(iter(texts), 8, "keep", "word")
    assert small.decode(small.encode(["x late a"])[0]) == "x late <unk>"
    assert tokenizer.encode(["<unused11> <mask>"])[0].tolist() == [tokenizer.unk_id] * 2


ERRORS = {
    "no text": ([], (1000,), "a tokenizer cannot be trained on no text"),
    "few bytes": (["the owl"], (1000,), r"the text is too small for 1000 pieces: 2\d\d are possible"),
    "no room for bytes": (["the owl"], (200,), "200 pieces are too few for bytes and special pieces: 261 are needed"),
    "few words": (["the owl"], (1000, "keep", "word"), "the text is too small for 1000 words: 7 are possible"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_text_that_is_too_small_is_an_error_that_says_what_is_possible(case):
    texts, (size, *rest), line = ERRORS[case]
    with pytest.raises(ValueError, match=line):
        Tokenizer.train(iter(texts), size, *(rest or ("keep", "bpe")))


def test_files_that_are_no_tokenizers_or_do_not_fit_are_refused_in_one_line(made, tmp_path):
    files = {
        "cut.json": ('{"model": {', "cut.json is not JSON: "),
        "config.json": ('{"model": "x"}', "config.json is no tokenizer.json .*: it has no model with a vocab"),
        "other.json": (
            '{"model": {"vocab": {"a": 0}}}',
            "other.json is no tokenizer.json of Hugging Face's tokenizers: ",
        ),
        "vocab.json": ("[]", "vocab.json is no vocabulary with merges: "),
    }
    (tmp_path / "merges.txt").write_text("a b\n")
    for name, (content, line) in files.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=line) as error:
            Tokenizer.load(str(tmp_path / name))
        assert "\n" not in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match="empty has no tokenizer: it needs tokenizer.model, tokenizer.json, or vocab.json"
    ):
        Tokenizer.load(str(tmp_path / "empty"))
    path = str(tmp_path / "tokenizer.json")
    made("words").save(path)
    for size in (1192, 1201, 1336):
        with pytest.raises(ValueError, match=f"vocabulary_size is {size}, but tokenizer model .* has 1200 pieces"):
            Tokenizer.load(path, size)
    assert type(Tokenizer.load(path, 1328)) is WordLevel
