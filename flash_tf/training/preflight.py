"""What training needs, found before any work: values that fit together, and files and devices that are there."""

import itertools
import os

import keras
from etils import epath

from flash_tf import model_stats, owned_files, presets
from flash_tf.config import Config
from flash_tf.data import tokenizers
from flash_tf.data.generated import Generated
from flash_tf.data.rows import placed
from flash_tf.data.sources import SOURCES
from flash_tf.data.sources.prepared import PreparedText
from flash_tf.training import mirror, modelling, run_directory
from flash_tf.training.inputs import make_packing, tokenizer_of_words, tokens_folder
from flash_tf.training.objective import Objective, has_fused_loss
from flash_tf.training.tasks import Classification, Extraction, TaskObjective, objective_of
from kernels_xla.common.cross_entropy import tokens_of_block

SPECIAL = 5  # pad, eos, unk, mask and cls
CHECKED = 1_000  # examples of each split; a mistake in later ones is found when their rows are made


def check(config: Config, model_dir: str | None = None) -> Config:
    """The config with its masking written out, once this machine has all that it needs.

    Args:
      config: The experiment.
      model_dir: The folder of a run, whose own tokenizer and checkpoints take the place of given ones.

    Raises:
      ValueError: A value is not valid, or a file or a device is not there.
    """
    config, model = check_values(config)
    if model_dir is not None:
        place = owned_files.place(model_dir)
        if not isinstance(SOURCES.build(config.data.source), PreparedText):
            owned_files.place(os.path.expanduser(tokens_folder(config, place)))
    if lacking := missing(config, model, model_dir):
        raise ValueError(lacking[0])
    return config


def check_values(config: Config) -> tuple[Config, keras.Model]:
    """The config with its masking written out, and its model without weights.

    Raises:
      ValueError: A value is not valid on any machine.
    """
    config = modelling.with_masking(config)
    if (size := config.model["vocabulary_size"]) <= SPECIAL:
        raise ValueError(f"model.vocabulary_size must be more than the {SPECIAL} special tokens, got {size}")
    SOURCES.build(config.data.source)
    if config.strategy.type == "jax":
        _check_jax(config)
    objective = objective_of(config)
    _check_sequence(config, objective)
    _check_data(config.data, objective, objective.encoder_of(config, None) is not None)
    if (metric := config.evaluation.metric) not in (known := ("loss", *objective.METRICS)):
        raise ValueError(f"evaluation.metric must be one of {', '.join(known)}, got {metric!r}")
    with model_stats.without_weights():
        return config, modelling.make_model(config)


def _check_jax(config):
    """Raises a ValueError for what only TensorFlow's strategies can do."""
    if config.train.jit_compile is False:
        raise ValueError("train.jit_compile must not be false with strategy.type jax, which compiles the whole step")
    if config.profile is not None:
        raise ValueError("profile needs a strategy of TensorFlow, got strategy.type jax")


def _check_sequence(config, objective):
    """Raises a ValueError unless the tokens of a sequence divide evenly among devices."""
    devices, n = (config.strategy.mesh or {}).get("sequence", 1), config.data.sequence_length
    if n % devices:
        raise ValueError(f"strategy.mesh.sequence must divide data.sequence_length {n}, got {devices}")
    if devices > 1 and issubclass(objective, TaskObjective):
        raise ValueError("strategy.mesh.sequence needs a language model, and this model reads labelled examples")


def _check_data(data, objective, labelled):
    """Raises a ValueError for options of examples with documents, and of documents with examples."""
    wrong = {
        "columns is for labelled examples": data.columns is not None and not labelled,
        "answerless_rows is for questions": data.answerless_rows != 1 and not issubclass(objective, Extraction),
        "labels is for classes": data.labels is not None and not issubclass(objective, Classification),
        "packing is for documents": data.packing != "concatenate" and labelled,
    }
    if said := next((said for said, given in wrong.items() if given), None):
        raise ValueError(f"data.{said}, and this model reads none from its source")


def missing(config: Config, model: keras.Model, model_dir: str | None = None) -> list[str]:
    """A line about each file and device that this machine lacks. It asks no other host, and reads little."""
    lacking = []
    needs = (
        lambda: _text(config),
        lambda: _prepared(config, model),
        lambda: _tokenizer(config, model_dir),
        lambda: _start(config, model_dir),
        lambda: _devices(config.strategy),
        lambda: mirror.check(config),
        lambda: _memory(config.strategy, model),
        lambda: check_kernels(config, model),
    )
    for need in needs:
        try:
            need()
        except (ValueError, OSError, ImportError) as error:
            lacking.append(" ".join(str(error).split()))
    return lacking


def _text(config):
    source, encoder = SOURCES.build(config.data.source), objective_of(config).encoder_of(config, None)
    for split in ("train", "validation"):
        shards = source.shards(split)
        if not shards:
            raise ValueError(f"the {split} split of data.source has no file")
        if encoder is not None and not isinstance(source, Generated):  # which makes no mistake
            every = itertools.chain.from_iterable(placed(source, split, shard) for shard in shards)
            if not (some := list(itertools.islice(every, CHECKED))):
                raise ValueError(f"the {split} split has no example")
            for one in some:
                encoder.check(one)


def _prepared(config, model):
    """The windows of a source that is prepared, before a run has its tokenizer."""
    source, objective, given = SOURCES.build(config.data.source), objective_of(config), config.data.tokenizer
    if not isinstance(source, PreparedText):
        return
    if objective.encoder_of(config, None) is not None:
        raise ValueError(f"this model reads labelled examples, and {source.tokenizer} holds windows of documents")
    found = tokenizers.load(given, config.model["vocabulary_size"]).fingerprint if isinstance(given, str) else None
    source.prepared.check(make_packing(config, objective, model), found or source.prepared.tokenizer)


def _tokenizer(config, model_dir):
    tokenizer_of_words(config)
    path = config.data.tokenizer
    if isinstance(path, str) and (model_dir is None or tokenizers.find(model_dir) is None):
        tokenizers.load(path, config.model["vocabulary_size"])


def _start(config, model_dir):
    path = config.init_from
    if path is None or _has(model_dir, "checkpoints"):
        return
    if not any(_has(path, name) for name in (presets.CONFIG, run_directory.CONFIG)):
        raise ValueError(f"init_from needs a run or a preset, and {path} is neither")


def _devices(config):
    if config.type != "jax":  # which counts its devices itself
        from flash_tf.training.strategy import check_devices

        check_devices(config)


def _memory(config, model):
    """On a processor alone: a GPU's memory is not known before its work, and many hosts may share one model."""
    if config.type == "jax":
        return
    from flash_tf.training.strategy import has_gpu

    needed, there = (
        model_stats.weight_and_optimizer_bytes(model),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    if needed > there and not has_gpu():
        raise ValueError(f"the weights and the optimizer need {needed:,} bytes of memory, and there are {there:,}")


def check_kernels(config: Config, model: keras.Model) -> None:
    """Raises a ValueError if a training step of the model, which is built, must run fused kernels, and cannot here."""
    rows, n = config.batch_size // config.train.accumulate, config.data.sequence_length
    for layer in model._flatten_layers(include_self=False):
        if hasattr(layer, "check_training"):
            layer.check_training(rows, n)
    if config.train.loss_implementation == "pallas":
        if objective_of(config).loss is not Objective.loss:
            kind = config.model["type"]
            raise ValueError(f"train.loss_implementation 'pallas' needs a language model, got model.type {kind}")
        predicted = rows * (n if config.masking is None else round(config.masking.rate * n))
        has_fused_loss(config, tokens_of_block(predicted), config.model["vocabulary_size"], model.compute_dtype)


def _has(folder, name):
    return folder is not None and epath.Path(f"{folder}/{name}").exists()
