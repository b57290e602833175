import gzip
import json
import lzma

import pytest

from flash_tf.data.sources import SOURCES, python_stdlib, text_files
from tests.data import tfds_fixture


def read(source, split="train"):
    return [text for shard in source.shards(split) for text in source.documents(split, shard)]


def files(tmp_path, pattern="*", **options):
    glob = str(tmp_path / pattern)
    return SOURCES.build({"type": "text_files", "train": glob, "validation": glob, **options})


# TFDS


C4 = [f"Page {i} of the web." for i in range(10)]
WIKI = (
    "\n_START_ARTICLE_\nOwl\n_START_PARAGRAPH_\nA bird._NEWLINE_Quiet.\n_START_SECTION_\nDiet\n_START_PARAGRAPH_\nMice."
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("tfds")
    tfds_fixture.store("c4/en:3.1.0", data_dir, {"train": C4, "validation": ["", "Last."]})
    tfds_fixture.store("wiki40b/en:1.3.0", data_dir, {"train": [WIKI], "validation": [WIKI]})
    tfds_fixture.store("pg19:0.1.1", data_dir, {"train": ["Call me\r\nIshmael."], "validation": ["Naïve."]})
    return str(data_dir)


def tfds(prepared, name="c4/en", **options):
    return SOURCES.build({"type": "tfds", "name": name, "data_dir": prepared, **options})


@pytest.mark.parametrize("name", ["c4", "c4/en", "c4/en:3.1.0"])
def test_c4_is_read_in_order_with_and_without_its_version(prepared, name):
    source = tfds(prepared, name, documents_per_shard=4)
    assert source.shards("train") == ["train[0:4]", "train[4:8]", "train[8:10]"]
    assert read(source) == C4
    assert list(source.documents("train", "train[4:8]")) == C4[4:8]
    assert source.identity() == tfds(prepared, "c4/en:3.1.0").identity()


def test_an_empty_example_is_no_document(prepared):
    assert read(tfds(prepared), "validation") == ["Last."]


def test_wiki40b_marks_become_plain_text(prepared):
    for name in ("wiki40b/en", "wiki40b/en:1.3.0"):
        assert read(tfds(prepared, name)) == ["Owl\nA bird.\nQuiet.\n\nDiet\nMice."]


def test_pg19_has_its_text_in_book_text(prepared):
    for name in ("pg19", "pg19:0.1.1"):
        source = tfds(prepared, name, text_key="book_text", counts_words=True)
        assert read(source) == ["Call me\r\nIshmael."]
        assert read(source, "validation") == ["Naïve."]
        assert source.counts_words
    with pytest.raises(ValueError, match="pg19 has no text_key 'text'; its text keys are: .*book_text"):
        read(tfds(prepared, "pg19"))


def test_a_split_may_be_slices_of_others(prepared):
    source = tfds(
        prepared, train_split="train[20%:50%]+train[-1:]", validation_split="train[:2]", documents_per_shard=2
    )
    assert source.shards("train") == ["train[2:4]", "train[4:5]", "train[9:10]"]
    assert read(source) == [*C4[2:5], C4[9]]
    assert read(source, "validation") == C4[:2]
    assert source.identity() != tfds(prepared).identity()


def test_a_split_that_is_not_there_is_an_error_that_names_those_that_are(prepared):
    with pytest.raises(ValueError, match="c4/en cannot give its validation split: .*'test'.*'train', 'validation'"):
        tfds(prepared, validation_split="test").shards("validation")
    with pytest.raises(ValueError, match=r"needs documents in train split 'train\[:0\]', has none"):
        tfds(prepared, train_split="train[:0]").shards("train")


def test_a_dataset_that_is_not_prepared_is_an_error_that_says_where_it_was_looked_for(prepared):
    for name in ("c4/en:2.2.0", "lambada"):
        with pytest.raises(ValueError, match=f"{name} is not prepared in {prepared}: prepare it .* data_dir"):
            tfds(prepared, name).shards("train")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        tfds(prepared, documents_per_shard=0)


# Text files


def test_a_file_is_a_document_unless_told_otherwise(tmp_path):
    (tmp_path / "b.txt").write_text("two\nlines", encoding="utf-8")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfna\xc3\xafve\r\n")
    (tmp_path / "folder.txt").mkdir()
    source = files(tmp_path, "*.txt")
    assert read(source) == ["naïve\r\n", "two\nlines"]
    assert len(source.shards("train")) == 1
    assert source.identity() == files(tmp_path, "*.txt").identity()
    (tmp_path / "b.txt").write_text("two\nlonger lines", encoding="utf-8")
    assert source.identity() != files(tmp_path, "*.txt").identity()


def test_globs_are_read_in_the_order_given_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    source = SOURCES.build({"type": "text_files", "train": ["~/b.txt", "~/*.txt"], "validation": "~/a.txt"})
    assert (read(source), read(source, "validation")) == (["b", "a"], ["a"])


@pytest.mark.parametrize("pack, suffix", [(bytes, ""), (gzip.compress, ".gz"), (lzma.compress, ".xz")])
def test_json_lines_are_read_packed_and_plain(tmp_path, monkeypatch, pack, suffix):
    monkeypatch.setattr(text_files, "SHARD_BYTES", 64)
    texts = [f"Document {i} " + "né" * i for i in range(20)]
    lines = "".join(json.dumps({"id": i, "body": text}, ensure_ascii=i % 2) + "\n\n" for i, text in enumerate(texts))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(lines.encode()))
    source = files(tmp_path, documents="key", key="body")
    assert read(source) == texts
    assert (len(source.shards("train")) == 1) == bool(suffix)


def test_half_a_surrogate_pair_in_json_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d, whole \\ud83d\\ude00"}')
    assert read(files(tmp_path, documents="key")) == ["half ?, whole 😀"]


@pytest.mark.parametrize("piece", [1, 2, 7, 16, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [0, 1])
def test_ranges_of_any_size_give_every_line_once(tmp_path, monkeypatch, piece, end, last):
    monkeypatch.setattr(text_files, "SHARD_BYTES", piece)
    lines = ["é", "bb", "", "a longer line", "c", "  ", "dd"]
    (tmp_path / "a.txt").write_bytes((end.join(lines) + end * last).encode())
    assert [text.rstrip(end) for text in read(files(tmp_path, documents="line"))] == [t for t in lines if t.strip()]


@pytest.mark.parametrize("piece", [5, 30, 1 << 20])
def test_an_article_reaches_from_heading_to_heading(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(text_files, "SHARD_BYTES", piece)
    before = " \nBefore any heading .\n \n"
    owl = " = Owl = \n \n An owl .\n \n = = Diet = = \n \n Mice .\n = Wins = \n = Losses = \n 3\n \n"
    (tmp_path / "a.txt").write_text(before + owl + " = X = \n \n Y\n", encoding="utf-8")
    assert read(files(tmp_path, documents="heading")) == [before, owl, " = X = \n \n Y\n"]


def test_small_files_share_a_piece_and_large_ones_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "SHARD_BYTES", 10)
    for name, size in (("a", 4), ("b", 5), ("c", 30), ("d", 3), ("e", 3)):
        (tmp_path / name).write_text(name * size)
    source = files(tmp_path)
    pieces = [[text[0] for text in source.documents("train", shard)] for shard in source.shards("train")]
    assert pieces == [["a", "b"], ["c"], ["d", "e"]]


@pytest.mark.parametrize(
    "content, options, message",
    [
        (b"a\r\nb\r\n\xff", {}, "a.txt needs UTF-8 text, got byte 0xff at byte 6"),
        (b"", {}, "a.txt is empty"),
        (b" \n\n", {"documents": "line"}, "needs text for train, found none in .*a.txt"),
        (b"ok\nab\xff\n", {}, "a.txt needs UTF-8 text, got byte 0xff at byte 5"),
        (b"ok\nab\xff\n", {"documents": "line"}, "a.txt needs UTF-8 text, got byte 0xff at byte 5"),
        (b"PK\0\1", {}, "a.txt needs UTF-8 text, got byte 0x00 at byte 2"),
        (b'{"text": "a"}\n{"text"\n', {"documents": "key"}, "a.txt, line 2 needs JSON, got '{\"text\"'"),
        (b'{"id": 1, "body": "a"}', {"documents": "key"}, "line 1 has no key 'text'; its keys are: id, body"),
        (b'\n["text"]', {"documents": "key"}, "line 2 needs a JSON object, got a list"),
        (b'{"text": 3}', {"documents": "key"}, "line 1 needs a string under 'text', got 3"),
        (b'{"text": ' + b"[" * 99_999, {"documents": "key"}, r"a.txt, line 1 needs JSON, got '{\"text\": \[+': "),
        (b'{"text": ' + b"1" * 9_999, {"documents": "key"}, "a.txt, line 1 needs JSON, got .*: .*4300 digits"),
    ],
)
def test_a_file_that_cannot_be_read_as_asked_is_an_error_that_says_where(tmp_path, content, options, message):
    (tmp_path / "a.txt").write_bytes(content)
    source = files(tmp_path, "a.txt", **options)
    with pytest.raises(ValueError, match=message):
        source.shards("train")
        read(source)


@pytest.mark.parametrize("pack, suffix", [(gzip.compress, ".gz"), (lzma.compress, ".xz")])
def test_a_broken_compressed_file_is_an_error_that_names_it(tmp_path, pack, suffix):
    packed = pack(bytes(range(32, 127)) * 9)
    for broken in (packed[:-9], b"not packed at all", packed[:20] + b"\0" * 9 + packed[29:]):
        (tmp_path / f"a{suffix}").write_bytes(broken)
        with pytest.raises(ValueError, match=f"a{suffix} is not a whole compressed file"):
            files(tmp_path).shards("train")


def test_a_file_whose_name_has_brackets_is_read_and_a_folder_in_place_of_files_is_named(tmp_path):
    (tmp_path / "vol [1].txt").write_text("Whales.\n")
    path = str(tmp_path / "vol [1].txt")
    assert read(SOURCES.build({"type": "text_files", "train": path, "validation": path})) == ["Whales.\n"]
    with pytest.raises(ValueError, match=f"but '{tmp_path}' is a folder: its files are '{tmp_path}/.'"):
        SOURCES.build({"type": "text_files", "train": str(tmp_path), "validation": path}).shards("train")


def test_two_stars_reach_any_folder_below_and_empty_files_are_left_out(tmp_path):
    for folder in ("a", "a/b", "a/b/c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(folder)
        (tmp_path / folder / "empty.txt").write_text("")
    assert sorted(read(files(tmp_path, "**/*.txt"))) == ["a", "a/b", "a/b/c"]
    source = SOURCES.build({"type": "text_files", "train": "gs://bucket/**/a", "validation": "b"})
    with pytest.raises(ValueError, match=r"gs://bucket/\*\*/a needs a glob without \*\*"):
        source.shards("train")


def test_a_key_of_documents_that_are_no_json_is_refused(tmp_path):
    for documents in ("file", "line", "heading"):
        with pytest.raises(ValueError, match=f"reads key 'body' only with documents: key, got {documents}"):
            files(tmp_path, documents=documents, key="body")


def test_a_glob_without_files_and_a_file_that_vanishes_are_errors(tmp_path):
    with pytest.raises(ValueError, match="files for train, but '.*nothing.*' matches none"):
        files(tmp_path, "nothing*").shards("train")
    (tmp_path / "a.txt").write_text("a")
    source = files(tmp_path)
    (piece,) = source.shards("train")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(OSError, match="a.txt cannot be read"):
        list(source.documents("train", piece))


def test_options_are_checked_by_name_and_type(tmp_path):
    with pytest.raises(ValueError, match="documents must be one of 'file', 'line'"):
        files(tmp_path, documents="paragraph")
    with pytest.raises(ValueError, match="train must be str or a list of str"):
        SOURCES.build({"type": "text_files", "train": 3, "validation": "b"})


def test_an_unknown_scheme_is_an_error_that_names_the_glob():
    source = SOURCES.build({"type": "text_files", "train": "nowhere://a/*", "validation": "b"})
    with pytest.raises(OSError, match="files nowhere://a/. for train cannot be listed"):
        source.shards("train")


def test_identities_are_the_same_after_json(prepared, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for source in (tfds(prepared), files(tmp_path), SOURCES.build({"type": "python_stdlib"})):
        assert json.loads(json.dumps(source.identity())) == source.identity()


# The standard library


def test_the_standard_library_is_some_ten_megabytes_without_tests_and_a_twentieth_validates():
    source = SOURCES.build({"type": "python_stdlib"})
    train, validation = read(source), read(source, "validation")
    size, held_out = sum(map(len, train)), sum(map(len, validation))
    assert 8e6 < size + held_out < 14e6
    assert 0.02 < held_out / size < 0.10
    assert not set(train) & set(validation) - {"\n"}
    assert all(sum(map(len, source.documents("train", shard))) < 6e6 for shard in source.shards("train"))
    assert not any(text.startswith("import unittest\nfrom test") for text in train)
    assert read(source) == train


def test_a_python_without_library_files_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ValueError, match="library as .py files, found none in .*python311.zip"):
        SOURCES.build({"type": "python_stdlib"}).shards("train")


def test_library_files_that_are_tests_or_not_utf8_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    for name in ("a.py", "b/c.py", "b/tests/d.py", "site-packages/e.py", "empty.py", "latin.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    source = SOURCES.build({"type": "python_stdlib"})
    texts = [
        text
        for split in ("train", "validation")
        for shard in source._shards(split)
        for text in source.documents(split, shard)
    ]
    assert sorted(texts) == ["# a.py", "# b/c.py"]
