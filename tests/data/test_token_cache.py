import json
import random
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from flash_tf.data import token_cache
from flash_tf.data.token_cache import TokenCache

ROOT = Path(__file__).parents[2]


class Letters:
    """A tokenizer with one token for each byte, after the special ones."""

    pad_id, eos_id, unk_id, mask_id, cls_id = range(5)
    special_ids = [0, 1, 2, 3, 4]
    fingerprint = "letters"

    def __init__(self, vocabulary_size: int = 5 + 256):
        self.vocabulary_size = vocabulary_size
        self.encoded = 0

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        self.encoded += len(texts)
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 5 for text in texts]


class Memory:
    """A source: a list of documents for each shard."""

    counts_words = True

    def __init__(self, *shards: list[str], version: int = 1):
        self.texts, self.version = shards, version

    def shards(self, split: str) -> list[str]:
        return [f"{split} {i}" for i in range(len(self.texts))]

    def documents(self, split: str, shard: str):
        return iter(self.texts[int(shard.split()[1])])

    def identity(self) -> dict:
        return {"name": "memory", "version": self.version}


def library(shards: int, documents: int, longest: int, seed: int = 0) -> Memory:
    """A source of random documents, some of them empty."""
    draw = random.Random(seed)
    return Memory(
        *(
            ["".join(draw.choices("abc dé", k=draw.randint(0, longest))) for _ in range(documents)]
            for _ in range(shards)
        )
    )


def expected(texts: list[str]) -> np.ndarray:
    """The tokens of a shard, document by document."""
    parts = [[byte + 5 for byte in text.encode()] + [Letters.eos_id] for text in texts if text]
    return np.array([token for part in parts for token in part])


def files(cache: TokenCache) -> set[str]:
    return {path.name for path in cache.directory.iterdir() if path.suffix != ".lock"}


def test_a_shard_holds_every_document_and_its_eos(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "BATCH_CHARACTERS", 50)  # several batches a shard
    source = library(shards=3, documents=40, longest=30)
    cache = TokenCache(tmp_path, source, Letters(), "train")
    assert cache.shards == ["train 0", "train 1", "train 2"]
    for index, texts in enumerate(source.texts):
        shard = cache.get(index)
        assert isinstance(shard.tokens, np.memmap) and shard.tokens.dtype == np.uint16
        np.testing.assert_array_equal(shard.tokens, expected(texts))
        full = [text for text in texts if text]
        assert shard.offsets.dtype == np.int64 and len(shard.offsets) == len(full) + 1
        for text, start, end in zip(full, shard.offsets[:-1], shard.offsets[1:], strict=True):
            assert bytes((shard.tokens[start : end - 1] - 5).astype(np.uint8)).decode() == text
        assert shard.words == sum(len(text.split()) for text in texts)
        assert shard.bytes == sum(len(text.encode()) for text in texts)


def test_tokens_of_a_large_vocabulary_are_kept_as_int32(tmp_path):
    small, large = Letters(1 << 16), Letters((1 << 16) + 1)
    large.fingerprint = "large"
    assert TokenCache(tmp_path, Memory(["a"]), small, "train").get(0).tokens.dtype == np.uint16
    assert TokenCache(tmp_path, Memory(["a"]), large, "train").get(0).tokens.dtype == np.int32


def test_a_shard_is_tokenized_once_over_caches_and_threads(tmp_path):
    source, tokenizer = library(shards=2, documents=20, longest=10), Letters()
    caches = [TokenCache(tmp_path, source, tokenizer, "train") for _ in range(4)]
    threads = [threading.Thread(target=cache.get, args=(index,)) for cache in caches for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.encoded == 40


def test_the_folder_is_keyed_by_tokenizer_source_and_split(tmp_path):
    other = Letters()
    other.fingerprint = "other"
    caches = [
        TokenCache(tmp_path, Memory(["a"]), Letters(), "train"),
        TokenCache(tmp_path, Memory(["a"]), Letters(), "validation"),
        TokenCache(tmp_path, Memory(["a"]), other, "train"),
        TokenCache(tmp_path, Memory(["a"], version=2), Letters(), "train"),
        TokenCache(tmp_path, Memory(["a"], ["b"]), Letters(), "train"),  # the same source, cut into other shards
    ]
    for cache in caches:
        cache.get(0)
    assert len({cache.directory for cache in caches}) == 5
    about = json.loads((caches[2].directory / "about.json").read_text())
    assert about.pop("shards") and about == {
        "split": "train",
        "source": {"name": "memory", "version": 1},
        "tokenizer": "other",
    }


def test_each_newly_kept_shard_is_reported_once(tmp_path):
    calls = []
    cache = TokenCache(tmp_path, Memory(["a"], [], ["b"]), Letters(), "train", lambda *call: calls.append(call))
    for index in (2, 0, 2, 1, 0):
        cache.get(index)
    assert calls == [(1, 3, "train shards"), (2, 3, "train shards"), (3, 3, "train shards")]


def test_a_shard_without_tokens_is_kept_as_an_empty_one(tmp_path):
    tokenizer = Letters()
    for _ in range(2):
        shard = TokenCache(tmp_path, Memory(["", ""]), tokenizer, "train").get(0)
        assert len(shard.tokens) == 0 and shard.offsets.tolist() == [0]
    assert tokenizer.encoded == 2


@pytest.mark.parametrize("suffix", ["tokens", "offsets", "json"])
@pytest.mark.parametrize("damage", ["remove", "shorten", "lengthen", "empty"])
def test_a_damaged_file_makes_the_shard_tokenized_again(tmp_path, suffix, damage):
    source, tokenizer = library(shards=2, documents=10, longest=10), Letters()
    cache = TokenCache(tmp_path, source, tokenizer, "train")
    cache.get(0), cache.get(1)
    path = cache.directory / f"00001.{suffix}"
    whole = path.read_bytes()
    path.unlink()
    if damage != "remove":
        path.write_bytes({"shorten": whole[:-1], "lengthen": whole + b"!", "empty": b""}[damage])
    np.testing.assert_array_equal(cache.get(1).tokens, expected(source.texts[1]))
    assert path.read_bytes() == whole
    assert tokenizer.encoded == 30


@pytest.mark.parametrize("suffix", ["offsets", "json"])
def test_zeros_in_place_of_a_file_make_the_shard_tokenized_again(tmp_path, suffix):
    cache = TokenCache(tmp_path, library(shards=1, documents=10, longest=10), Letters(), "train")
    cache.get(0)
    path = cache.directory / f"00000.{suffix}"
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes(len(whole)))
    cache.get(0)
    assert path.read_bytes() == whole


def test_a_full_disk_raises_oserror_and_leaves_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "BATCH_CHARACTERS", 1000)
    source, tokenizer = Memory(["x" * 900] * 200), Letters()
    cache = TokenCache(tmp_path, source, tokenizer, "train")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_001, hard))  # refuses the rest in the middle of a write
    try:
        with pytest.raises(OSError, match="cannot write the tokens of a shard: .*00000.tokens.partial"):
            cache.get(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(cache) == {"about.json"}
    assert 0 < tokenizer.encoded < 200
    np.testing.assert_array_equal(cache.get(0).tokens, expected(source.texts[0]))


def test_an_error_of_the_source_passes_and_leaves_no_file_behind(tmp_path):
    class Broken(Memory):
        def documents(self, split, shard):
            yield "text"
            raise ValueError("line 2 is not JSON")

    cache = TokenCache(tmp_path, Broken(["text"]), Letters(), "train")
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        cache.get(0)
    assert files(cache) == {"about.json"}


def tokenize_slowly(directory: str) -> None:
    """Runs in the child process until it is killed: says that it begins, then writes in many small steps."""

    class Slow(Letters):
        def encode(self, texts):
            time.sleep(0.0005)
            return super().encode(texts)

    token_cache.BATCH_CHARACTERS = 100
    cache = TokenCache(directory, library(shards=6, documents=400, longest=40), Slow(), "train")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for index in range(6):
        cache.get(index)


def test_a_kill_at_any_moment_leaves_whole_shards_or_none(tmp_path):
    source = library(shards=6, documents=400, longest=40)
    draw, interrupted = random.Random(7), 0
    code = f"from tests.data.test_token_cache import tokenize_slowly; tokenize_slowly({str(tmp_path)!r})"
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.0, 0.12))
        child.kill()
        child.communicate()
        tokenizer = Letters()
        cache = TokenCache(tmp_path, source, tokenizer, "train")
        kept = [i for i in range(6) if (cache.directory / f"{i:05d}.json").exists()]
        interrupted += any(cache.directory.glob("*.partial"))
        for index in kept:
            np.testing.assert_array_equal(cache.get(index).tokens, expected(source.texts[index]))
        assert tokenizer.encoded == 0  # the shards on disk were whole
    assert interrupted  # some kills fell into the middle of a shard
    for index, texts in enumerate(source.texts):
        np.testing.assert_array_equal(cache.get(index).tokens, expected(texts))
    assert tokenizer.encoded == 400 * (6 - len(kept))
    assert not any(cache.directory.glob("*.partial"))
