"""The running Python's own standard library: real text that every machine has."""

import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from flash_tf.data.sources import SOURCES

SHARD_BYTES = 4 << 20
# Tests, installed packages and demonstrations are left out. So are the character tables of `encodings`: they are nearly
# copies of each other, so training would show the answers of the validation.
LEFT_OUT = frozenset(
    "test tests idle_test site-packages dist-packages __pycache__ turtledemo ensurepip encodings".split()
)


@SOURCES.register("python_stdlib")
class PythonStdlib:
    """About 11 MB of Python code with comments. Each file is a document; a twentieth of the files is for validation.

    The text depends on the running Python version. Files that are not UTF-8 are left out.
    """

    counts_words = False

    def shards(self, split: str) -> list[str]:
        return list(self._shards(split))

    def documents(self, split: str, shard: str) -> Iterator[str]:
        for path in self._shards(split)[shard]:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield text

    def identity(self) -> dict:
        sizes = [path.stat().st_size for path in _files()]
        return {"python": platform.python_version(), "files": len(sizes), "bytes": sum(sizes)}

    def _shards(self, split: str) -> dict[str, list[Path]]:
        """Names of shards and the files of each, in the order of their paths."""
        shards, size = [[]], 0
        for path in _files():
            if _split_of(path) == split:
                if size >= SHARD_BYTES:
                    shards.append([])
                    size = 0
                shards[-1].append(path)
                size += path.stat().st_size
        return {f"{split}-{i:05d}-of-{len(shards):05d}": one for i, one in enumerate(shards)}


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files() -> list[Path]:
    """The library's files, sorted; ValueError if Python has none, for example in a zip archive."""
    files = []
    for folder, folders, names in os.walk(_root()):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ValueError(
            f"source 'python_stdlib' needs Python's standard library as .py files, found none in {_root()}"
        )
    return sorted(files)


def _split_of(path: Path) -> str:
    """Either "train" or "validation", by the path within the library: the same on every machine."""
    return "train" if zlib.crc32(path.relative_to(_root()).as_posix().encode()) % 20 else "validation"
