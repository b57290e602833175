import subprocess
import sys
import threading
import time
from itertools import product

import numpy as np
import pytest
import tensorflow as tf

from flash_tf.data.packing import Packing
from flash_tf.data.stream import EvaluationBatches, WindowStream
from flash_tf.data.token_cache import TokenCache
from tests.data.test_token_cache import ROOT, Letters, Memory, expected, library

WAYS = list(product(("concatenate", "documents"), (0, 1)))


class Counting(Memory):
    """A source that records the shards that were read, in order."""

    def __init__(self, *shards):
        super().__init__(*shards)
        self.read = []

    def documents(self, split, shard):
        self.read.append(int(shard.split()[1]))
        return super().documents(split, shard)


def a_cache(directory, source=None, split="train") -> TokenCache:
    return TokenCache(directory, source or library(shards=5, documents=12, longest=40), Letters(), split)


def a_stream(cache, packing="concatenate", overlap=1, seed=3, limit=50, n=16) -> WindowStream:
    cut = Packing(kind=packing, sequence_length=n, overlap=overlap, align=4)
    return WindowStream(cache, cut, seed=seed, limit=limit)


def an_evaluation(cache, packing="concatenate", overlap=1, batch_size=4, windows=None) -> EvaluationBatches:
    cut = Packing(kind=packing, sequence_length=16, overlap=overlap, align=4)
    return EvaluationBatches(cache, cut, batch_size=batch_size, windows=windows)


def epoch_length(stream: WindowStream) -> int:
    epochs = stream.batch(0, 1000)["window"][:, 0]
    return int((epochs == 0).sum())


def wait_until(condition) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited 5 seconds in vain")


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize(("packing", "overlap"), WAYS)
def test_reading_on_from_any_position_gives_what_reading_through_gives(tmp_path, packing, overlap):
    whole = a_stream(a_cache(tmp_path), packing, overlap).batch(0, 400)
    assert whole["tokens"].shape == (400, 16 + overlap) and whole["tokens"].dtype == np.int32
    assert ("segment_ids" in whole) == (packing == "documents")
    assert whole["window"][:, 0].max() >= 2  # batches cross shards and epochs
    draw = np.random.default_rng(0)
    for _ in range(20):
        position, count = int(draw.integers(0, 390)), int(draw.integers(1, 10))
        resumed = a_stream(a_cache(tmp_path), packing, overlap).batch(position, count)
        assert_same(resumed, {name: rows[position : position + count] for name, rows in whole.items()})


@pytest.mark.parametrize(("packing", "overlap"), WAYS)
def test_every_epoch_reads_every_window_once_in_another_order(tmp_path, packing, overlap):
    stream = a_stream(a_cache(tmp_path), packing, overlap)
    size = epoch_length(stream)
    epochs = [stream.batch(epoch * size, size) for epoch in range(3)]
    for epoch, batch in enumerate(epochs):
        assert batch["window"].tolist() == [[epoch, number] for number in range(size)]
    rows = [batch["tokens"].tolist() for batch in epochs]
    assert sorted(rows[0]) == sorted(rows[1]) == sorted(rows[2])
    assert rows[0] != rows[1] != rows[2] != rows[0]
    assert rows[0] != a_stream(a_cache(tmp_path), packing, overlap, seed=4).batch(0, size)["tokens"].tolist()


def test_both_the_shards_and_the_windows_in_a_shard_are_shuffled(tmp_path):
    source = Memory(*[[chr(ord("a") + shard) * (16 * 20 - 1)] for shard in range(8)])
    stream = a_stream(a_cache(tmp_path, source), overlap=0)
    tokens = np.concatenate([stream.batch(epoch * 160, 160)["tokens"] for epoch in range(2)]).reshape(2, 8, 20, 16)
    shards = tokens[..., 0, 0]
    assert shards[0].tolist() != sorted(shards[0]) and shards[0].tolist() != shards[1].tolist()
    last = np.argmax(tokens[..., -1] == Letters.eos_id, axis=2)  # the place of the shard's last window
    assert len(np.unique(last)) > 5


def test_a_single_shard_is_read_in_another_order_in_every_epoch(tmp_path):
    stream = a_stream(a_cache(tmp_path, library(shards=1, documents=30, longest=40)))
    size = epoch_length(stream)
    orders = [stream.batch(epoch * size, size)["tokens"].tolist() for epoch in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_the_order_is_the_same_whatever_the_limit(tmp_path):
    assert_same(
        a_stream(a_cache(tmp_path), limit=1).batch(0, 100), a_stream(a_cache(tmp_path), limit=500).batch(0, 100)
    )


def test_only_the_shards_up_to_the_limit_are_tokenized(tmp_path):
    source = Counting(*[["x" * (16 * 10)] for _ in range(20)])  # ten windows each
    stream = a_stream(a_cache(tmp_path, source), limit=30)
    wait_until(lambda: len(source.read) == 3)  # ahead of the reader, which has not begun
    stream.batch(0, 30)
    list(stream.dataset(0, batch_size=5).as_numpy_iterator())
    assert len(source.read) == 3


def test_the_first_shard_is_read_while_later_ones_are_still_to_come(tmp_path):
    class Gated(Counting):
        gate = threading.Event()

        def documents(self, split, shard):
            if self.read:
                self.gate.wait(10)
            return super().documents(split, shard)

    source = Gated(*[["x" * (16 * 10)] for _ in range(3)])
    stream = a_stream(a_cache(tmp_path, source), limit=30)
    stream.batch(0, 10)
    assert len(source.read) == 1
    source.gate.set()
    stream.batch(10, 20)
    assert len(source.read) == 3


def test_an_error_in_the_background_is_raised_in_the_reader(tmp_path):
    class Broken(Counting):
        def documents(self, split, shard):
            if len(self.read) == 2:
                raise OSError("the archive is damaged")
            return super().documents(split, shard)

    stream = a_stream(a_cache(tmp_path, Broken(*[["x" * 160] for _ in range(5)])), limit=40)

    def fails() -> bool:
        try:
            stream.batch(0, 1)
        except OSError as error:
            return "archive is damaged" in str(error)
        return False

    wait_until(fails)
    with pytest.raises(tf.errors.OpError, match="archive is damaged"):
        next(iter(stream.dataset(0, batch_size=1)))


def read_and_leave(directory: str) -> None:
    """Runs in the child process: reads a batch while the next shard takes a minute."""

    class Slow(Counting):
        def documents(self, split, shard):
            if self.read:
                time.sleep(60)
            return super().documents(split, shard)

    a_stream(a_cache(directory, Slow(["x" * 160], ["x" * 160])), limit=20).batch(0, 5)


@pytest.mark.full
def test_the_background_thread_does_not_keep_the_process_alive(tmp_path):
    code = f"from tests.data.test_stream import read_and_leave; read_and_leave({str(tmp_path)!r})"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=50, capture_output=True).returncode == 0


@pytest.mark.parametrize("pipelines", [1, 2, 4])
@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_input_pipelines_share_each_global_batch_row_by_row(tmp_path, packing, pipelines):
    stream = a_stream(a_cache(tmp_path), packing)
    datasets = [stream.dataset(6, 8, pipelines, pipeline) for pipeline in range(pipelines)]
    width = 8 // pipelines
    assert datasets[0].element_spec["tokens"] == tf.TensorSpec((width, 17), tf.int32)
    assert datasets[0].element_spec["window"] == tf.TensorSpec((width, 2), tf.int32)
    steps = list(zip(*[dataset.as_numpy_iterator() for dataset in datasets], strict=True))
    assert len(steps) == 6  # from 6 up to the limit of 50, the last begun at 46
    for step, shares in enumerate(steps):
        whole = {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}
        assert_same(whole, stream.batch(6 + 8 * step, 8))


@pytest.mark.parametrize(("pipelines", "pipeline"), [(3, 0), (2, 2), (2, -1)])
def test_unequal_shares_are_refused(tmp_path, pipelines, pipeline):
    with pytest.raises(ValueError, match=f"batch_size 8, pipelines {pipelines}, pipeline {pipeline}"):
        a_stream(a_cache(tmp_path)).dataset(0, 8, pipelines, pipeline)


@pytest.mark.parametrize("texts", [[[""], []], [["short"], ["shorter"]]])
def test_a_split_without_a_window_is_one_clear_error(tmp_path, texts):
    longest = max(len(expected(shard)) for shard in texts)
    message = (
        f"the train split has no window: it needs a shard of at least 16 tokens, the longest of its 2 has {longest}"
    )
    with pytest.raises(ValueError, match=message):
        a_stream(a_cache(tmp_path, Memory(*texts))).batch(0, 1)


def test_shards_without_windows_are_passed_over(tmp_path):
    source = Memory([""], ["x" * 160], [], ["y" * 160])
    stream = a_stream(a_cache(tmp_path, source))
    assert stream.batch(0, 60)["window"][:, 0].tolist() == [0] * 20 + [1] * 20 + [2] * 20


def test_a_limit_below_one_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="limit must be at least 1 window, got 0"):
        a_stream(a_cache(tmp_path), limit=0)


def targets(batch: dict) -> list[int]:
    """The tokens to predict from their predecessors, in reading order."""
    tokens, ids = batch["tokens"], batch.get("segment_ids")
    predicted = tokens[:, 1:] != Letters.pad_id if ids is None else (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
    return tokens[:, 1:][predicted].tolist()


@pytest.mark.parametrize("batch_size", [1, 4, 7, 500])
@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_evaluation_predicts_every_token_of_the_split_once_and_in_order(tmp_path, packing, batch_size):
    cache = a_cache(tmp_path, split="validation")
    evaluation = an_evaluation(cache, packing, batch_size=batch_size)
    text = np.concatenate([cache.get(index).tokens for index in range(5)])
    for _ in range(2):
        batches = list(evaluation)
        assert len(batches) == len(evaluation)
        assert {batch["tokens"].shape for batch in batches} == {(batch_size, 17)}
        assert [token for batch in batches for token in targets(batch)] == text.tolist()
    assert evaluation.tokens == len(text)
    assert evaluation.words == sum(cache.get(index).words for index in range(5))


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_masked_evaluation_holds_every_token_of_the_split_once_and_in_order(tmp_path, packing):
    cache = a_cache(tmp_path, split="validation")
    evaluation = an_evaluation(cache, packing, overlap=0)
    read = np.concatenate([batch["tokens"].ravel() for batch in evaluation])
    text = np.concatenate([cache.get(index).tokens for index in range(5)])
    np.testing.assert_array_equal(read[(read != Letters.pad_id) & (read != Letters.cls_id)], text)
    assert evaluation.tokens == len(text)


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_rows_after_the_last_window_are_padding_alone(tmp_path, packing):
    evaluation = an_evaluation(a_cache(tmp_path), packing, batch_size=500)
    (batch,) = evaluation
    empty = (batch["tokens"] == Letters.pad_id).all(axis=1)
    count = 500 - empty.sum()
    assert 0 < count < 500 and not empty[:count].any()
    assert batch["window"][:count].tolist() == [[0, number] for number in range(count)]
    assert packing == "concatenate" or not batch["segment_ids"][count:].any()


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_a_limited_evaluation_reads_the_first_windows_and_counts_their_tokens_only(tmp_path, packing):
    source = Counting(*library(shards=5, documents=12, longest=40).texts)
    cache = a_cache(tmp_path, source)
    some = an_evaluation(cache, packing, windows=6)
    assert source.read == [0]
    (first, second), whole = list(some), an_evaluation(cache, packing)
    assert some.words is None and some.tokens == len(targets(first)) + len(targets(second))
    (all_first, all_second), last = list(whole)[:2], len(whole)
    assert last > 2
    assert_same(first, all_first)
    np.testing.assert_array_equal(second["tokens"][:2], all_second["tokens"][:2])
    assert (second["tokens"][2:] == Letters.pad_id).all()


def test_words_are_not_counted_when_the_last_shard_is_cut_short(tmp_path):
    cache = a_cache(tmp_path, library(shards=1, documents=30, longest=40))
    assert an_evaluation(cache, windows=2).words is None


def test_a_limit_beyond_the_split_evaluates_the_whole_split(tmp_path):
    cache = a_cache(tmp_path)
    some, whole = an_evaluation(cache, windows=10_000), an_evaluation(cache)
    assert (some.words, some.tokens, len(some)) == (whole.words, whole.tokens, len(whole))


def test_an_evaluation_without_a_window_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match="the validation split has no window: it needs a shard of at least 1 tokens"):
        an_evaluation(a_cache(tmp_path, Memory([""], []), "validation"))
    with pytest.raises(ValueError, match="windows must be at least 1, or None for all, got 0"):
        an_evaluation(a_cache(tmp_path), windows=0)
