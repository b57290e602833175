"""From a config to its tokenizer and token caches."""

import os
import time
from collections.abc import Callable

import tensorflow as tf

from flash_tf.config import Config
from flash_tf.data.sources import SOURCES
from flash_tf.data.token_cache import TokenCache
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training.restore import check_vocabulary, kept_tokenizer
from flash_tf.training.run_directory import TOKENIZER

WAIT = 600  # seconds that other workers give the chief to make a tokenizer


def make_tokenizer(config: Config, model_dir: str, *, chief: bool, report: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of a run: the one beside the model, else the one that the config gives, else a new one.

    Whichever it is, it is kept beside the model.
    """
    path = f"{model_dir}/{TOKENIZER}"
    needed = config.model["vocabulary_size"]
    if not tf.io.gfile.exists(path) and chief:
        if config.data.tokenizer is not None:
            tokenizer = Tokenizer.load(config.data.tokenizer)
            check_vocabulary(tokenizer, needed, config.data.tokenizer)
        else:
            report(f"training a tokenizer of {needed:,} pieces on the training split")
            tokenizer = Tokenizer.train(_documents(config), needed, config.data.whitespace)
        tokenizer.save(f"{path}.partial")
        tf.io.gfile.rename(f"{path}.partial", path, overwrite=True)
    deadline = time.monotonic() + WAIT
    while not tf.io.gfile.exists(path):
        if time.monotonic() > deadline:
            raise ValueError(f"{path} did not come from worker 0 within {WAIT} s: is it running, with this folder?")
        time.sleep(1)
    return kept_tokenizer(config, model_dir)


def _documents(config):
    source = SOURCES.build(config.data.source)
    for shard in source.shards("train"):
        yield from source.documents("train", shard)


def make_cache(config: Config, model_dir: str, tokenizer: Tokenizer, split: str, report) -> TokenCache:
    """The tokens of a split, kept beside the model unless the config names a place."""
    place = config.data.cache or f"{model_dir}/tokens"
    if "://" in place:
        raise ValueError(f"tokens are kept on a local disk: set data.cache to a local folder, got {place}")
    return TokenCache(os.path.expanduser(place), SOURCES.build(config.data.source), tokenizer, split, report)
