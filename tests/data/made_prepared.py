"""Prepared windows of random documents, in the way of `flash-tf prepare`, without its pipeline."""

from pathlib import Path

from flash_tf.data.packing import Packing
from flash_tf.data.prepared import Layout, Prepared
from flash_tf.data.prepared_files import PreparedFiles, begin, finish, join_rests, write_unit
from flash_tf.data.token_cache import TokenCache
from tests.data.test_token_cache import Letters, library

ABOUT = {"tokenizer": Letters.fingerprint, "source": {"type": "memory"}, "identity": "some", "counts_words": True}


def packing_of(kind: str, overlap: int) -> Packing:
    return Packing(kind=kind, sequence_length=16, overlap=overlap, align=4)


def a_cache(folder: Path, split: str = "train", **sizes) -> TokenCache:
    return TokenCache(str(folder), library(**{"shards": 5, "documents": 12, "longest": 60, **sizes}), Letters(), split)


def files_of(folder: Path, layout: Layout, split: str = "train", units: int = 5) -> PreparedFiles:
    return PreparedFiles(f"{folder}/{split}", layout, [f"{split} {i}" for i in range(units)])


def prepare(folder: Path, packing: Packing, windows_per_file: int = 8, **sizes) -> Prepared:
    """Writes both splits of a library into `folder/prepared`."""
    layout, target = Layout.of(packing, Letters(), windows_per_file), folder / "prepared"
    about, splits = {**ABOUT, **layout.as_mapping()}, {}
    begin(str(target), about)
    for split in ("train", "validation"):
        cache = a_cache(folder / "cache", split, **sizes)
        files = files_of(target, layout, split, len(cache.shards))
        for number in range(len(cache.shards)):
            write(files, number, cache)
        units = files.written()
        for number, pieces in files.missing_joins(units).items():
            join_rests(files.folder, layout, len(files.units), number, pieces)
        splits[split] = files.about(units)
    finish(str(target), about, splits)
    return Prepared(str(target))


def write(files: PreparedFiles, number: int, cache: TokenCache) -> None:
    """Writes a unit, which is a shard of the cache."""
    last = cache.split == "validation"
    write_unit(files.folder, files.layout, number, files.units[number], cache.get(number), Letters(), pad_last=last)
