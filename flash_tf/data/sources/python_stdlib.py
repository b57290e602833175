"""The running Python's own standard library: real text that every machine has."""

import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from flash_tf.data.sources import SOURCES

PIECE_BYTES = 4 << 20
# Tests, installed packages and demonstrations; and the character tables of `encodings`, which are near-copies of one
# another, so that validation would find in training what it asks for.
LEFT_OUT = frozenset(
    "test tests idle_test site-packages dist-packages __pycache__ turtledemo ensurepip encodings".split()
)


@SOURCES.register("python_stdlib")
class PythonStdlib:
    """About 11 MB of Python code and its comments, one document a file, a twentieth of the files for validation.

    The text is that of the Python version that runs. Files that are not UTF-8 are left out.
    """

    counts_words = False

    def shards(self, split: str) -> list[str]:
        return list(self._pieces(split))

    def documents(self, split: str, shard: str) -> Iterator[str]:
        for path in self._pieces(split)[shard]:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield text

    def identity(self) -> dict:
        sizes = [path.stat().st_size for path in _files()]
        return {"python": platform.python_version(), "files": len(sizes), "bytes": sum(sizes)}

    def _pieces(self, split: str) -> dict[str, list[Path]]:
        """Names of pieces and the files of each, in the order of their paths."""
        pieces, size = [[]], 0
        for path in _files():
            if _split_of(path) == split:
                if size >= PIECE_BYTES:
                    pieces.append([])
                    size = 0
                pieces[-1].append(path)
                size += path.stat().st_size
        return {f"{split}-{i:05d}-of-{len(pieces):05d}": piece for i, piece in enumerate(pieces)}


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files() -> list[Path]:
    """The library's files, sorted; ValueError if Python came without them, as from a zip archive."""
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
    """Either "train" or "validation", by the path within the library, so the same on every machine."""
    return "train" if zlib.crc32(path.relative_to(_root()).as_posix().encode()) % 20 else "validation"
