"""Labelled examples as rows: pairs, prompts and questions over long texts, each by its documented rule."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from flash_tf.data import pixels
from flash_tf.data.encoders import IGNORED, AnswerEncoder, ClassLabel, NumberLabel, TextEncoder, TwoTextEncoder
from flash_tf.data.rows import RowCache, RowPacking
from flash_tf.data.sources.example_files import ExampleFiles
from flash_tf.data.sources.hf_datasets import HfDatasets
from flash_tf.data.spans import SpanEncoder
from flash_tf.data.stream import EvaluationBatches, WindowStream
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.models.span import best_spans


class Words:
    """A tokenizer with a token for each letter of a word: `a` is 10, `b` 11 and so on."""

    pad_id, eos_id, cls_id, vocabulary_size, fingerprint = 0, 1, 2, 40, "words"

    def encode(self, texts):
        return [np.array([ord(c) - 87 for c in text.replace(" ", "")], np.int32) for text in texts]

    encode_words = encode


def rows(encoder, *examples, **options):
    return list(encoder.rows([(f"file, example {i}", one) for i, one in enumerate(examples, 1)], **options))


def ids(row, name="tokens"):
    return [int(i) for i in row[name]]


def test_an_answer_follows_the_blank_that_a_tokenizer_does_not_keep():
    text = "the capital of france is paris and the word is whale " * 40
    tokenizer = Tokenizer.train(iter([text]), 270, "collapse", "bpe")
    encoder = AnswerEncoder(tokenizer, 64, None)
    for prompt, answer in (("the capital is", " paris"), ("the capital is ", "paris"), ("the capital is ", " paris")):
        (row,) = rows(encoder, {"prompt": prompt, "answer": answer})
        assert tokenizer.decode(ids(row)) == "the capital is paris"
    (row,) = rows(encoder, {"prompt": "the capital is", "answer": "paris"})
    assert tokenizer.decode(ids(row)) == "the capital isparis"


def test_a_text_and_a_pair_are_rows_with_their_special_ids():
    encoder = TextEncoder(Words(), 9, None, ClassLabel(3, ["x", "y", "z"]))
    one, pair = rows(encoder, {"text": "ab", "label": "z"}, {"text": "ab", "text_b": "c", "label": 0})
    assert (ids(one), ids(one, "labels")) == ([2, 10, 11, 1], [2])
    assert (ids(pair), ids(pair, "labels")) == ([2, 10, 11, 1, 12, 1], [0])
    two = TwoTextEncoder(Words(), 9, None, ClassLabel(2, None))
    (row,) = rows(two, {"text": "ab", "text_b": "c", "label": "1"})
    assert (ids(row), ids(row, "tokens_b"), ids(row, "labels")) == ([2, 10, 11, 1], [2, 12, 1], [1])


@pytest.mark.parametrize("value", [-1, "-1", np.int64(-1)])
def test_numerals_that_name_classes_are_names_in_every_type(value):
    encoder = TextEncoder(Words(), 9, None, ClassLabel(3, ["0", "-1", "1"]))
    assert [ids(row, "labels") for row in rows(encoder, *({"text": "a", "label": x} for x in (value, 0, "1")))] == [
        [1],
        [0],
        [2],
    ]


@pytest.mark.parametrize(
    ("a", "b", "kept"), [("aaaaaaaa", "bb", (4, 2)), ("aa", "bbbbbbbb", (2, 4)), ("aaaaa", "bbbbb", (3, 3))]
)
def test_the_longer_text_of_a_pair_is_cut_until_both_are_of_one_length(a, b, kept):
    (row,) = rows(TextEncoder(Words(), 9, None, NumberLabel()), {"text": a, "text_b": b, "label": "2.5"})
    assert ids(row) == [2, *[10] * kept[0], 1, *[11] * kept[1], 1] and row["labels"] == [2.5]


def test_columns_name_keys_also_in_nested_records_and_say_whether_there_is_a_second_text():
    encoder = TextEncoder(Words(), 9, {"text": "a.b", "label": "y"}, ClassLabel(2, None))
    (row,) = rows(encoder, {"a": {"b": "c"}, "text_b": "d", "y": 1})
    assert ids(row) == [2, 12, 1]
    with pytest.raises(ValueError, match=r"file, example 1 has no key 'a.b' for text; its keys are: c"):
        rows(encoder, {"a": {"c": "c"}, "y": 1})


def test_a_key_with_a_dot_is_found_before_a_nested_record():
    encoder = TextEncoder(Words(), 9, {"text": "a.1", "label": "y"}, ClassLabel(2, None))
    whole, nested = rows(encoder, {"a.1": "b", "a": {"1": "c"}, "y": 1}, {"a": {"1": "c"}, "y": 1})
    assert (ids(whole), ids(nested)) == ([2, 11, 1], [2, 12, 1])


@pytest.mark.parametrize("value", [10**400, "nan", "x", None])
def test_a_label_that_is_no_finite_number_is_refused_with_its_place(value):
    with pytest.raises(ValueError, match="^file, example 1: label must be a finite number of float32, got "):
        rows(TextEncoder(Words(), 9, None, NumberLabel()), {"text": "a", "label": value})


def test_only_an_answer_and_its_end_are_labels_and_a_long_prompt_loses_its_beginning():
    encoder = AnswerEncoder(Words(), 6, None)
    short, long = rows(encoder, {"prompt": "ab", "answer": "c"}, {"prompt": "abcdefgh", "answer": "xy"})
    assert (ids(short), ids(short, "labels")) == ([1, 10, 11, 12], [-1, -1, 12, 1])
    assert (ids(long), ids(long, "labels")) == ([1, 15, 16, 17, 33, 34], [-1, -1, -1, 33, 34, 1])
    (given,) = rows(encoder, {"token_ids": [3, 4, 5], "labels": [-1, 7, -1]})
    assert (ids(given), ids(given, "labels")) == ([3, 4, 5], [-1, 7, -1])
    with pytest.raises(ValueError, match=r"example 1 needs an answer of 1 to 5 tokens, got 6"):
        rows(encoder, {"prompt": "a", "answer": "abcdef"})
    with pytest.raises(ValueError, match=r"example 1 needs ids from 0 to 39"):
        rows(encoder, {"token_ids": [40], "labels": [-1]})


CONTEXT = "aa bb cc dd ee ff gg hh ii jj"
QUESTION = {"question": "qqqqqqqq", "context": CONTEXT}


def test_a_long_text_is_rows_that_overlap_by_half_and_every_part_without_the_answer_points_at_cls():
    encoder = SpanEncoder(Words(), 16, None)  # 4 of the question, 9 of the text
    found = rows(encoder, {**QUESTION, "answers": {"text": ["ff gg"], "answer_start": [15]}})
    assert [ids(row, "part") for row in found] == [[0], [1], [2], [3]]
    letters = [token for word in CONTEXT.split() for token in Words().encode([word])[0].tolist()]
    covered = [ids(row)[6:-1] for row in found]
    assert covered == [letters[first : first + 9] for first in (0, 5, 10, 15)]
    for row in found:
        first, last = row["labels"]
        assert len(row["tokens"]) == len(row["words"]) <= 16 and ids(row)[:6] == [2, *[26] * 4, 1]
        words = row["words"][6:-1]
        whole = 5 in words and 6 in words
        assert (first, last) != (0, 0) if whole else (first, last) == (0, 0)
        if whole:
            assert row["words"][first] == 5 and row["words"][last] == 6
    assert sum(tuple(row["labels"]) != (0, 0) for row in found) > 0


def test_names_are_found_without_regard_to_case_punctuation_and_articles_or_leave_a_row_without_a_label():
    encoder = SpanEncoder(Words(), 64, None)
    named, absent, none = rows(
        encoder,
        {**QUESTION, "answers": ["zz", "The JJ"]},
        {**QUESTION, "answers": ["zz"]},
        {**QUESTION, "answers": {"text": [], "answer_start": []}},
    )
    assert [named["words"][i] for i in named["labels"]] == [9, 9]
    assert (absent["labels"], none["labels"]) == ([IGNORED] * 2, [0, 0])


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            {"text": ["cc"], "answer_start": [5]},
            "answer_start 5 must be the place of 'cc' in the context, which has ' c'",
        ),
        ({"text": ["cc"]}, "answers need text, a list of strings, and answer_start, as many whole numbers"),
        ({"text": ["cc"], "answer_start": ["6"]}, ".*as many whole numbers"),
        ({"text": ["cc"], "answer_start": [6.0]}, ".*as many whole numbers"),
        ({"text": "cc", "answer_start": 6}, ".*as many whole numbers"),
        ("cc", "answers must be a record with text and answer_start, or a list of strings, got 'cc'"),
    ],
)
def test_answers_that_do_not_fit_their_text_are_refused(answers, said):
    with pytest.raises(ValueError, match=f"file, example 1: {said}"):
        rows(SpanEncoder(Words(), 64, None), {**QUESTION, "answers": answers})


def test_the_best_span_is_the_best_of_all_pairs_inside_the_text():
    rng = np.random.default_rng(0)
    logits, words = (
        rng.normal(size=(20, 12, 2)).astype("float32"),
        np.tile([-1, -1, 0, 0, 1, 2, 2, 3, 4, 5, -1, -1], (20, 1)),
    )
    for row, found in zip(logits, np.asarray(best_spans(logits, words, 3)), strict=True):
        pairs = [(row[i, 0] + row[j, 1], i, j) for i in range(2, 10) for j in range(i, min(i + 3, 10))]
        score, i, j = max(pairs)
        assert found == pytest.approx([score, row[0].sum(), words[0, i], words[0, j]])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_training_reads_every_row_with_an_answer_and_a_share_of_the_others_and_validation_all(tmp_path, share):
    word = lambda i: f"{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}"  # noqa: E731
    contexts = [" ".join(word(31 * i + j) for j in range(100)) for i in range(40)]
    answers = [{"text": [text[60:62]], "answer_start": [60]} if i % 4 else [] for i, text in enumerate(contexts)]
    examples = [{"question": "q", "context": c, "answers": a} for c, a in zip(contexts, answers, strict=True)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples))
    source = ExampleFiles(str(tmp_path / "*.jsonl"), str(tmp_path / "*.jsonl"))
    encoder = SpanEncoder(Words(), 32, None, share)
    found = {}
    for split in ("train", "validation"):
        labels = RowCache(tmp_path / str(share), source, Words(), split, encoder).get(0).values["labels"]
        found[split] = np.reshape(labels, (-1, 2)).any(axis=1)
    with_answer, kept = found["validation"].sum(), np.mean([~found["train"]]) * len(found["train"])
    assert with_answer == found["train"].sum() > 30 and (~found["validation"]).sum() > 400
    assert kept / (~found["validation"]).sum() == pytest.approx(share, abs=0.07 if 0 < share < 1 else 0)


def test_rows_are_read_in_the_order_of_a_stream_and_once_through_for_evaluation(tmp_path):
    for name, numbers in (("one", range(30)), ("two", range(30, 50))):
        lines = [json.dumps({"text": "abc"[: 1 + i % 3], "label": i}) for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    source = ExampleFiles(str(tmp_path / "*.jsonl"), str(tmp_path / "*.jsonl"))
    encoder = TextEncoder(Words(), 8, None, NumberLabel())
    cache = RowCache(tmp_path, source, Words(), "train", encoder)
    stream = WindowStream(cache, RowPacking(encoder.fields), seed=3, limit=100)
    whole = stream.batch(0, 100)
    assert whole["tokens"].shape == (100, 8) and sorted(whole["labels"][:50, 0]) == list(range(50))
    assert whole["labels"][:50].tolist() != whole["labels"][50:].tolist()
    again = WindowStream(
        RowCache(tmp_path, source, Words(), "train", encoder), RowPacking(encoder.fields), seed=3, limit=100
    )
    for name, array in again.batch(37, 20).items():
        np.testing.assert_array_equal(array, whole[name][37:57])
    batches = list(EvaluationBatches(cache, RowPacking(encoder.fields), batch_size=8))
    labels = np.concatenate([batch["labels"] for batch in batches])[:, 0]
    assert labels[:50].tolist() == list(range(50)) and np.isnan(labels[50:]).all() and len(labels) == 56
    other = RowCache(tmp_path, source, Words(), "train", TextEncoder(Words(), 9, None, NumberLabel()))
    assert other.directory != cache.directory


def test_a_label_that_is_corrected_is_read_anew(tmp_path):
    path, encoder = tmp_path / "all.jsonl", TextEncoder(Words(), 8, None, NumberLabel())
    for label in (3, 4):  # in a file of the same size
        path.write_text(json.dumps({"text": "ab", "label": label}) + "\n")
        source = ExampleFiles(str(path), str(path))
        shard = RowCache(tmp_path / "rows", source, Words(), "train", encoder).get(0)
        assert shard.values["labels"].tolist() == [label]


def test_shards_of_another_size_are_made_anew(tmp_path, monkeypatch):
    class Split(list):
        _fingerprint = "one"

    found = {split: Split({"text": "a", "label": i} for i in range(10)) for split in ("train", "validation")}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path: found))
    encoder = TextEncoder(Words(), 8, None, NumberLabel())
    for size, shards in ((4, ["train[0:4]", "train[4:8]", "train[8:10]"]), (16, ["train[0:10]"])):
        cache = RowCache(tmp_path, HfDatasets("folder", examples_per_shard=size), Words(), "train", encoder)
        assert cache.shards == shards
        labels = [cache.get(i).values["labels"].tolist() for i in range(len(shards))]
        assert sum(labels, []) == list(range(10))


def test_rows_are_made_anew_after_a_change_of_the_rule_for_grey(tmp_path, monkeypatch):
    path, encoder = tmp_path / "all.jsonl", TextEncoder(Words(), 8, None, NumberLabel())
    path.write_text('{"text": "ab", "label": 3}\n')
    made = lambda: RowCache(tmp_path, ExampleFiles(str(path), str(path)), Words(), "train", encoder).directory  # noqa: E731
    before = made()
    monkeypatch.setattr(pixels, "GREY", "another")
    assert made() != before
