"""Writes the tokens of a config's data as one array, for machines that have no TensorFlow.

    python -m benchmarks.write_tokens wikipedia_lm/flash train train.npy

The config must name a tokenizer. Tokens that a run left in `data.cache` are read from there.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import device
from flash_tf.training.progress import Progress


def main(arguments: list[str] | None = None) -> int:
    """Writes the file; returns the exit status."""
    args = _parser().parse_args(arguments)
    partial = Path(f"{args.out}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)  # so that a bad place fails before the work
    with device.libraries_in_log() as console:
        array = _tokens(args.config, args.split, args.set, Progress(console))
    with partial.open("wb") as file:  # np.save would add a suffix to a path without one
        np.save(file, array)
    partial.replace(args.out)
    print(f"{args.out}: {len(array):,} tokens of {array.dtype}")
    return 0


def _tokens(name, split, overrides, progress):
    """A split's documents, each followed by eos, `[t]`: uint16, or int32 for vocabularies above 65,536."""
    from flash_tf import config
    from flash_tf.data.tokenizer import Tokenizer
    from flash_tf.training.restore import check_vocabulary
    from flash_tf.training.run import make_cache

    loaded = config.load(name, overrides)
    if loaded.data.tokenizer is None:
        raise ValueError(f"{name} has no data.tokenizer, which the tokens need")
    tokenizer = Tokenizer.load(loaded.data.tokenizer)
    check_vocabulary(tokenizer, loaded.model["vocabulary_size"], loaded.data.tokenizer)
    progress.line(f"tokenising the {split} split of {name}")
    with tempfile.TemporaryDirectory() as directory:
        cache = make_cache(loaded, directory, tokenizer, split, progress.tokenised)
        return np.concatenate([cache.get(i).tokens for i in range(len(cache.shards))])


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.write_tokens", description=__doc__.splitlines()[0])
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a name that `flash-tf list` shows")
    parser.add_argument("split", choices=("train", "validation"))
    parser.add_argument("out", metavar="FILE.npy")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override an option")
    return parser


if __name__ == "__main__":
    device.program(main)
