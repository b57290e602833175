import json
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from flash_tf.data import prepared, stored
from flash_tf.data.packing import Packing
from flash_tf.data.prepared import Layout, Prepared
from flash_tf.data.prepared_files import begin, join_rests
from flash_tf.data.shuffling import key_of, shuffled
from flash_tf.data.stream import WindowStream
from tests.data.made_prepared import ABOUT, a_cache, files_of, packing_of, prepare, write
from tests.data.test_token_cache import ROOT, Letters

WAYS = list(product(("concatenate", "documents"), (0, 1)))


def counted(batch: dict) -> list:
    """The windows of a batch without their order."""
    return sorted(zip(*(batch[name].tolist() for name in ("tokens", "segment_ids") if name in batch), strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000])
def test_an_order_has_each_number_once_and_each_key_its_own(count):
    orders = [shuffled(np.arange(count), count, key_of(seed, 1)).tolist() for seed in range(20)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 3 or len(set(map(tuple, orders))) > 2


def test_every_number_comes_to_every_place_about_equally_often():
    found = np.zeros((7, 7))
    for seed in range(700):
        found[np.arange(7), shuffled(np.arange(7), 7, key_of(seed, 0))] += 1
    assert 55 < found.min() and found.max() < 145  # 100 each: almost five standard deviations


@pytest.mark.parametrize(("kind", "overlap"), WAYS)
def test_an_epoch_of_prepared_windows_is_an_epoch_of_the_token_caches(tmp_path, kind, overlap):
    train = prepare(tmp_path, packing_of(kind, overlap)).splits["train"]
    assert train.full > 3 and train.windows % 8
    stream = WindowStream(a_cache(tmp_path / "cache"), packing_of(kind, overlap), seed=3, limit=2 * train.windows)
    ours, theirs = train.batch(0, train.windows, seed=3), stream.batch(0, train.windows)
    assert counted(ours) == counted(theirs)
    assert all(ours[name].dtype == theirs[name].dtype for name in theirs)
    assert ours["window"].tolist() == theirs["window"].tolist()
    second = train.batch(train.windows, train.windows, seed=3)
    assert counted(second) == counted(ours) and second["tokens"].tolist() != ours["tokens"].tolist()
    assert train.batch(0, train.windows, seed=4)["tokens"].tolist() != ours["tokens"].tolist()


def test_batches_at_any_place_are_slices_of_one_order(tmp_path):
    train = prepare(tmp_path, packing_of("documents", 1)).splits["train"]
    whole = train.batch(0, 3 * train.windows, seed=5)
    for position, count in ((0, 3), (7, 2), (train.windows - 1, 9), (2 * train.windows - 5, train.windows)):
        piece = train.batch(position, count, seed=5)
        assert all((piece[name] == whole[name][position : position + count]).all() for name in whole)


def test_the_last_windows_of_a_validation_split_are_padded_and_its_counts_are_the_texts(tmp_path):
    split = prepare(tmp_path, packing_of("concatenate", 1), longest=30).splits["validation"]
    cache = a_cache(tmp_path / "cache", "validation", longest=30)
    shards = [cache.get(i) for i in range(len(cache.shards))]
    assert split.tokens == sum(len(shard.tokens) for shard in shards)
    assert (split.words, split.bytes) == tuple(sum(getattr(s, name) for s in shards) for name in ("words", "bytes"))
    tokens = split.read(np.arange(split.windows))["tokens"]
    assert (tokens[:, 1:] != Letters.pad_id).sum() == split.tokens


def test_what_is_missing_is_found_at_any_stage(tmp_path):
    layout = Layout.of(packing_of("concatenate", 0), Letters(), 8)
    cache, files = a_cache(tmp_path / "cache"), files_of(tmp_path, layout)
    for number in (0, 1, 3, 4):
        write(files, number, cache)
    assert sorted(files.written()) == [0, 1, 3, 4]
    (tmp_path / "train" / "0000001-00000.windows").unlink()
    (tmp_path / "train" / "0000003.json").write_text("{}")
    assert sorted(files.written()) == [0, 4]
    for number in (1, 2, 3):
        write(files, number, cache)
    units = files.written()
    assert len(units) == 5 and len(files.missing_joins(units)) == len(files.joins(units)) > 1
    (tmp_path / "train" / "0000004.rest").rename(tmp_path / "kept")
    assert sorted(files.written()) == [0, 1, 2, 3]
    (tmp_path / "kept").rename(tmp_path / "train" / "0000004.rest")
    for number, pieces in enumerate(files.joins(units)):
        join_rests(files.folder, layout, 5, number, pieces)
    files.remove_rests()
    assert len(files.written()) == 5 and not files.missing_joins(units)


def test_a_folder_of_other_windows_or_files_is_refused(tmp_path):
    begin(str(tmp_path / "new"), {**ABOUT, "size": 1})
    begin(str(tmp_path / "new"), {**ABOUT, "size": 1})
    with pytest.raises(ValueError, match="with another size: 1, and this config has 2"):
        begin(str(tmp_path / "new"), {**ABOUT, "size": 2})
    with pytest.raises(ValueError, match="is not prepared to its end"):
        Prepared(str(tmp_path / "new"))
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".prepared.json.deadbeef.partial").write_text("{")
    begin(str(tmp_path / "killed"), ABOUT)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds thesis.txt, which flash-tf prepare did not write"):
        begin(str(tmp_path / "own"), ABOUT)
    with pytest.raises(ValueError, match=r"has no prepared.json"):
        Prepared(str(tmp_path / "own"))


def test_a_run_needs_windows_of_its_tokenizer_and_its_packing(tmp_path):
    made = prepare(tmp_path, packing_of("concatenate", 1))
    made.check(packing_of("concatenate", 1), "letters")
    made.check(Packing(kind="concatenate", sequence_length=16, overlap=1, align=64), "letters")
    with pytest.raises(ValueError, match="with another tokenizer"):
        made.check(packing_of("concatenate", 1), "words")
    with pytest.raises(ValueError, match="with overlap 1, and this config needs 0"):
        made.check(packing_of("concatenate", 0), "letters")


def test_a_file_that_is_missing_or_cut_short_is_named(tmp_path):
    made = prepare(tmp_path, packing_of("concatenate", 1))
    made.splits["train"].check()
    path = tmp_path / "prepared" / "train" / "0000001-00000.windows"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"0000001-00000.windows needs 8 windows of 34 bytes"):
        made.splits["train"].batch(0, made.splits["train"].windows, seed=0)
    path.unlink()
    with pytest.raises(ValueError, match=r"0000001-00000.windows is missing"):
        made.splits["train"].check()
    manifest = tmp_path / "prepared" / prepared.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    with pytest.raises(ValueError, match="has format 2, and this version reads 1"):
        Prepared(str(tmp_path / "prepared"))
    manifest.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        Prepared(str(tmp_path / "prepared"))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(TypeError):
        stored.write(f"{tmp_path}/new/file", "text in place of bytes")
    assert stored.names(f"{tmp_path}/new") == set()
    stored.write(f"{tmp_path}/new/file", b"bytes")
    assert stored.names(f"{tmp_path}/new") == {"file"} and stored.read(f"{tmp_path}/new/file") == b"bytes"


def test_windows_are_read_by_numpy_alone(tmp_path):
    made = prepare(tmp_path, packing_of("documents", 0))
    expected = made.splits["train"].batch(3, 4, seed=1)["tokens"].tolist()
    program = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "from flash_tf.data.prepared import Prepared\n"
        f"split = Prepared({made.directory!r}).splits['train']\n"
        "print(split.batch(3, 4, seed=1)['tokens'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected)


def test_the_cost_of_a_place_does_not_grow_with_the_files():
    layout = Layout.of(packing_of("concatenate", 1), Letters(), 8)
    about = {"documents": 1, "tokens": 1, "words": None, "bytes": 1}
    split = prepared.PreparedSplit("there", layout, {"windows": 8 * 10**6 + 3, "files": [10**6, 1], **about})
    last = split.windows * 4 - 2
    order = split.order(np.array([3, 3]), np.array([last % split.windows, last % split.windows + 1]), seed=1)
    assert (order >= 8 * 10**6).all() and split.path(10**6) == "there/0000001-00000.windows"
