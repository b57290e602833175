import time
from itertools import pairwise, product

import numpy as np
import pytest

from flash_tf.data.packing import Packing
from flash_tf.data.token_cache import TokenizedShard
from tests.data.test_token_cache import Letters

PAD, EOS, CLS = Letters.pad_id, Letters.eos_id, Letters.cls_id


def shard_of(documents: list[list[int]]) -> TokenizedShard:
    parts = [np.array([*ids, EOS]) for ids in documents]
    offsets = np.cumsum([0, *map(len, parts)])
    tokens = np.concatenate([np.zeros(0), *parts]).astype(np.uint16)
    return TokenizedShard(tokens=tokens, offsets=offsets, words=0, bytes=0)


def documents(count: int, longest: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(5, 261, generator.integers(1, longest + 1)).tolist() for _ in range(count)]


def read(texts, kind, n, overlap, align=1, pad_last=True):
    packing = Packing(kind=kind, sequence_length=n, overlap=overlap, align=align)
    windows = packing.cut(shard_of(texts), Letters(), pad_last=pad_last)
    return windows, windows.tokens(np.arange(len(windows))), windows.segment_ids(np.arange(len(windows)))


def segments(tokens: np.ndarray, ids: np.ndarray) -> list[tuple[int, list[int]]]:
    """Column and tokens of every segment, in reading order."""
    return [
        (int(np.argmax(line == number)), row[line == number].tolist())
        for row, line in zip(tokens, ids, strict=True)
        for number in range(1, line.max() + 1)
    ]


SHAPES = list(product((1, 2, 7, 16), (0, 1), range(4)))


@pytest.mark.parametrize(("n", "overlap", "seed"), SHAPES)
def test_concatenated_windows_are_the_stream_cut_every_n_tokens(n, overlap, seed):
    texts = documents(10, 12, seed)
    stream = [EOS] * overlap + [token for text in texts for token in [*text, EOS]]
    whole = [stream[i : i + n + overlap] for i in range(0, len(stream) - overlap, n)]
    _, tokens, _ = read(texts, "concatenate", n, overlap, pad_last=False)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [row for row in whole if len(row) == n + overlap]
    windows, tokens, _ = read(texts, "concatenate", n, overlap)
    assert tokens.tolist() == [row + [PAD] * (n + overlap - len(row)) for row in whole]
    assert windows.text_tokens(len(windows)) == len(stream) - overlap


@pytest.mark.parametrize(("kind", "align"), [("concatenate", 1), ("documents", 1), ("documents", 4)])
@pytest.mark.parametrize(("n", "seed"), list(product((2, 7, 16), range(3))))
def test_every_token_is_a_target_exactly_once_when_the_partial_window_is_kept(kind, align, n, seed):
    texts = documents(10, 40, seed)
    windows, tokens, ids = read(texts, kind, n, 1, align)
    predicted = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
    assert tokens[:, 1:][predicted].tolist() == [token for text in texts for token in [*text, EOS]]
    assert windows.text_tokens(len(windows)) == predicted.sum()
    for count in range(len(windows)):
        assert windows.text_tokens(count) == predicted[:count].sum()


@pytest.mark.parametrize(("n", "overlap", "seed"), SHAPES)
@pytest.mark.parametrize("align", [1, 3])
def test_packed_documents_keep_their_order_their_bounds_and_their_alignment(n, overlap, seed, align):
    texts = documents(12, 3 * n, seed)
    windows, tokens, ids = read(texts, "documents", n, overlap, align)
    opening = EOS if overlap else CLS
    pieces = []
    for text in texts:
        whole = [opening, *text, EOS]
        pieces += [whole[i : i + n + overlap] for i in range(0, len(whole) - overlap, n)]
    found = segments(tokens, ids)
    assert [piece for _, piece in found] == pieces
    assert all(column % align == 0 for column, _ in found)
    assert (tokens[ids == 0] == PAD).all()
    assert all((np.diff(row[row > 0]) >= 0).all() for row in ids)
    assert windows.text_tokens(len(windows)) == sum(len(text) + 1 for text in texts)


@pytest.mark.parametrize(("n", "overlap", "align"), list(product((5, 16), (0, 1), (1, 4))))
def test_a_packed_row_ends_only_where_the_next_piece_does_not_fit(n, overlap, align):
    _, tokens, ids = read(documents(30, n, seed=3), "documents", n, overlap, align)
    for row, following in pairwise(ids):
        used = n + overlap - int(np.argmax(row[::-1] > 0))
        column = -(-used // align) * align
        assert column + int((following == 1).sum()) > n + overlap


def test_rows_do_not_depend_on_what_else_is_read_with_them():
    windows, tokens, ids = read(documents(40, 20, seed=1), "documents", 16, 1, 4)
    for indices in ([3], [5, 0, 5], np.arange(len(windows))[::-2]):
        np.testing.assert_array_equal(windows.tokens(indices), tokens[indices])
        np.testing.assert_array_equal(windows.segment_ids(indices), ids[indices])


@pytest.mark.parametrize(("kind", "overlap"), product(("concatenate", "documents"), (0, 1)))
def test_an_empty_shard_has_no_windows(kind, overlap):
    windows, _, _ = read([], kind, 8, overlap)
    assert len(windows) == 0 and windows.text_tokens(0) == 0


@pytest.mark.parametrize("kind", ["concatenate", "documents"])
def test_a_shard_of_25_million_tokens_is_cut_in_seconds(kind):
    lengths = np.random.default_rng(0).integers(2, 1000, 50_000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shard = TokenizedShard(tokens=np.ones(offsets[-1], np.uint16), offsets=offsets, words=0, bytes=0)
    start = time.process_time()
    windows = Packing(kind=kind, sequence_length=512, overlap=1, align=256).cut(shard, Letters(), pad_last=False)
    windows.tokens(np.arange(0, len(windows), len(windows) // 128))
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "document"}, "packing must be one of concatenate, documents, got 'document'"),
        ({"overlap": 2}, "overlap must be 0 .* or 1 .*, got 2"),
        ({"sequence_length": 0}, "must be at least 1, got 0 and 1"),
        ({"align": 0}, "must be at least 1, got 8 and 0"),
    ],
)
def test_an_impossible_packing_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Packing(**{"kind": "documents", "sequence_length": 8, "overlap": 1, "align": 1} | wrong)
