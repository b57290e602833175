"""What a run reads: its tokenizer, its tokens, and the windows or rows that they are cut into."""

import functools
import os
import time
from collections.abc import Callable

import keras
from etils import epath

from flash_tf import owned_files
from flash_tf.config import Config, TokenizerConfig
from flash_tf.data import tokenizers
from flash_tf.data.packing import Packing
from flash_tf.data.prepared import Prepared
from flash_tf.data.rows import RowCache, RowPacking, placed
from flash_tf.data.sources import SOURCES
from flash_tf.data.sources.prepared import PreparedText
from flash_tf.data.stream import EvaluationBatches
from flash_tf.data.token_cache import TokenCache
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.data.tokenizers import word_level
from flash_tf.training.progress import Progress
from flash_tf.training.restore import load_tokenizer
from flash_tf.training.tasks import TaskObjective, objective_of

EVALUATED_AT_ONCE = 2**14  # tokens on a replica; an evaluation has the logits of all
WAIT = 600  # seconds that other workers give the chief to make a tokenizer


def make_packing(config: Config, objective, model: keras.Model) -> Packing | RowPacking:
    """The rule by which a config's shards become windows or rows."""
    if isinstance(objective, TaskObjective):
        return RowPacking(objective.encoder.fields)
    return Packing(
        kind=config.data.packing,
        sequence_length=config.data.sequence_length,
        overlap=objective.overlap,
        align=model.align,
    )


def prepared_text(config: Config, packing: Packing | RowPacking, tokenizer: Tokenizer) -> Prepared | None:
    """The windows of a source that is prepared; None for other sources.

    Raises:
      ValueError: They are of another packing or another tokenizer.
    """
    source = SOURCES.build(config.data.source)
    if not isinstance(source, PreparedText):
        return None
    source.prepared.check(packing, tokenizer.fingerprint)
    return source.prepared


def evaluated_rows(config: Config, replicas: int = 1) -> int:
    """Windows of an evaluation's batch: each replica has one at least, and no more than a micro-batch of training."""
    trained = config.batch_size // replicas // config.train.accumulate
    return replicas * max(1, min(EVALUATED_AT_ONCE // config.data.sequence_length, trained))


def evaluation_batches(
    config: Config,
    model_dir: str,
    model: keras.Model,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    progress: Progress,
    of_prepared: type,
) -> Callable[[], EvaluationBatches]:
    """Makes the batches of the validation split, which a call tokenizes unless they are prepared.

    Args:
      config: The experiment.
      model_dir: The folder of the run.
      model: Its model.
      tokenizer: Its tokenizer.
      batch_size: Windows of a batch.
      progress: Shows how much is tokenized.
      of_prepared: Makes batches of a `PreparedSplit`.

    Raises:
      ValueError: The source has no validation split.
    """
    packing = make_packing(config, objective_of(config)(config, tokenizer), model)
    size = {"batch_size": batch_size, "windows": config.evaluation.windows}
    if (prepared := prepared_text(config, packing, tokenizer)) is not None:
        return functools.partial(of_prepared, prepared.splits["validation"], **size)
    cache = make_cache(config, model_dir, tokenizer, "validation", progress.tokenized)
    return functools.partial(EvaluationBatches, cache, packing, **size)


def make_tokenizer(config: Config, model_dir: str, *, chief: bool, report: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of a run: the one in the model directory, else the config's or `init_from`'s, else a new one.

    It is saved in the model directory.

    Args:
      config: The experiment.
      model_dir: The model directory.
      chief: Whether this process makes the tokenizer. Others wait for it.
      report: Called with a line before a new tokenizer is trained.

    Raises:
      ValueError: It does not fit the vocabulary, the text is too small for a new one, or the chief is too late.
    """
    if tokenizers.find(model_dir) is None and chief:
        tokenizer = _new_tokenizer(config, report)
        path = f"{model_dir}/{tokenizer.file}"
        tokenizer.save(f"{path}.partial")
        epath.Path(f"{path}.partial").replace(path)
    deadline = time.monotonic() + WAIT
    while tokenizers.find(model_dir) is None:
        if time.monotonic() > deadline:
            raise ValueError(
                f"worker 0 did not write a tokenizer to {model_dir} within {WAIT} s: is it running with this folder?"
            )
        time.sleep(1)
    return load_tokenizer(config, model_dir)


def _new_tokenizer(config, report):
    """The config's tokenizer or `init_from`'s, else a new one."""
    data, needed = config.data, config.model["vocabulary_size"]
    if (own := tokenizer_of_words(config)) is not None:
        return own
    trained = TokenizerConfig() if data.tokenizer is None else data.tokenizer
    given = data.tokenizer if isinstance(data.tokenizer, str) else config.init_from  # whose weights know its ids
    given = given or getattr(SOURCES.build(data.source), "tokenizer", None)
    if given is not None:
        return Tokenizer.load(given, needed)
    report(
        f"training a tokenizer of {needed:,} {'words' if trained.train == 'word' else 'pieces'} on the training split"
    )
    return Tokenizer.train(_documents(config), needed, data.whitespace, trained.train, trained.byte_fallback)


def tokenizer_of_words(config: Config) -> Tokenizer | None:
    """The tokenizer of a source that has words of its own, else None.

    Raises:
      ValueError: The words do not fit the vocabulary size, or there is another tokenizer.
    """
    words, where = getattr(SOURCES.build(config.data.source), "words", None), f"source {config.data.source['type']}"
    if words is None:
        return None
    if config.data.tokenizer is not None:
        raise ValueError(f"{where} has words of its own: leave data.tokenizer out")
    return word_level.of_pieces([*word_level.SPECIAL, *words], config.model["vocabulary_size"], where=where)


def _documents(config):
    source, encoder = SOURCES.build(config.data.source), objective_of(config).encoder_of(config, None)
    for shard in source.shards("train"):
        if encoder is None:
            yield from source.documents("train", shard)
        else:
            yield from (text for example in placed(source, "train", shard) for text in encoder.texts(example))


def make_cache(
    config: Config, model_dir: str, tokenizer: Tokenizer, split: str, on_progress: Callable[[int, int, str], None]
) -> TokenCache:
    """The tokens or rows of a split, on disk in the model directory or in the folder of `data.cache`."""
    folder, source = os.path.expanduser(tokens_folder(config, model_dir)), SOURCES.build(config.data.source)
    if (encoder := objective_of(config).encoder_of(config, tokenizer)) is not None:
        return RowCache(folder, source, tokenizer, split, encoder, on_progress)
    return TokenCache(folder, source, tokenizer, split, on_progress)


def tokens_folder(config: Config, model_dir: str) -> str:
    """The folder of a run's tokens; ValueError if it is in a bucket."""
    folder = config.data.cache or f"{model_dir}/tokens"
    if not owned_files.is_local(folder):
        raise ValueError(f"tokens need a local disk: set data.cache to a local folder, got {folder}")
    return folder
