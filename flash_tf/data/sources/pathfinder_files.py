"""Pathfinder in the Long-Range Arena's release."""

import os
from collections.abc import Iterator
from pathlib import Path

from flash_tf.data import pixels
from flash_tf.data.example_formats import Record, checksums
from flash_tf.data.sources import SOURCES

LEVELS = ("curv_baseline", "curv_contour_length_9", "curv_contour_length_14")
PARTS = {"train": (0, 0.8), "validation": (0.8, 0.9)}  # the arena's; the last tenth is its test split


@SOURCES.register("pathfinder_files")
class PathfinderFiles:
    """The images of a folder `pathfinder32`, `pathfinder64`, `pathfinder128` or `pathfinder256` as texts of pixels.

    `LEVEL/metadata/*.npy` are texts with an image on each line: its folder, its name, its number, and its label. Images
    of no bytes are left out, as the release's `curv_contour_length_14/imgs/0/sample_172.png`.

    Args:
      data_dir: The folder. `~` is the home folder.
      level: Length of the paths: `curv_baseline`, `curv_contour_length_9`, or `curv_contour_length_14`, the arena's.
    """

    labelled = True
    counts_words = False
    words = pixels.WORDS

    def __init__(self, data_dir: str, level: str = LEVELS[-1]):
        if level not in LEVELS:
            raise ValueError(f"source 'pathfinder_files' needs a level of {', '.join(LEVELS)}, got {level!r}")
        self.folder = Path(os.path.expanduser(data_dir))
        self.level = level

    def shards(self, split: str) -> list[str]:
        """The lists of images, as paths."""
        found = sorted((self.folder / self.level / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path))
        start, end = (round(part * len(found)) for part in PARTS[split])
        if start == end:
            raise ValueError(
                f"source 'pathfinder_files' needs lists of images for {split} in "
                f"{self.folder / self.level / 'metadata'}, got {len(found)} in all"
            )
        return [str(path) for path in found[start:end]]

    def examples(self, split: str, shard: str) -> Iterator[Record]:
        try:
            lines = Path(shard).read_text("utf-8").rstrip("\n").split("\n")
        except UnicodeDecodeError:
            raise ValueError(f"{shard} needs lines of text, as the release has them, got other bytes") from None
        for number, line in enumerate(lines, 1):
            folder, name, _, label, *_ = [*line.split(), *[""] * 4]
            if label not in ("0", "1"):
                raise ValueError(f"{shard}, line {number} needs a folder, a name, a number and a label, got {line!r}")
            path = self.folder / self.level / folder / name
            if image := path.read_bytes():
                yield {"text": _decoded(image, path), "label": int(label)}

    def checksums(self, split: str) -> list[int]:
        return checksums(self.shards(split))

    def identity(self) -> dict:
        lists = {split: [[path, os.path.getsize(path)] for path in self.shards(split)] for split in PARTS}
        return {"pathfinder": str(self.folder), "level": self.level, "lists": lists}


def _decoded(image, path):
    import tensorflow as tf

    try:
        return tf.io.decode_png(image, channels=1).numpy()[..., 0]
    except tf.errors.InvalidArgumentError:
        raise ValueError(f"{path} is not a whole PNG file") from None
