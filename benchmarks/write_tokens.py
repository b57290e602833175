"""Writes the tokens of a config's data as one array, for machines that have no TensorFlow.

python -m benchmarks.write_tokens wikipedia_lm/flash train train.npy
"""

import argparse
import tempfile

import numpy as np

from flash_tf import config
from flash_tf.data.sources import SOURCES
from flash_tf.data.token_cache import TokenCache
from flash_tf.data.tokenizer import Tokenizer


def tokens(name: str, split: str, overrides: list[str]) -> np.ndarray:
    """The documents of a split one after the other, each followed by eos: uint16 `[t]`."""
    loaded = config.load(name, overrides)
    if loaded.data.tokenizer is None:
        raise ValueError(f"{name} has no data.tokenizer: tokens without their vocabulary are of no use")
    source, tokenizer = SOURCES.build(loaded.data.source), Tokenizer.load(loaded.data.tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        cache = TokenCache(directory, source, tokenizer, split, lambda *progress: None)
        return np.concatenate([cache.get(i).tokens for i in range(len(cache.shards))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a name that `flash-tf list` shows")
    parser.add_argument("split", choices=("train", "validation"))
    parser.add_argument("out", metavar="FILE.npy")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override an option")
    args = parser.parse_args()
    try:
        array = tokens(args.config, args.split, args.set)
    except (ValueError, OSError) as error:
        raise SystemExit(f"write_tokens: {error}") from None
    np.save(args.out, array)
    print(f"{args.out}: {len(array):,} tokens of {array.dtype}")


if __name__ == "__main__":
    main()
