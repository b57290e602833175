"""Writes training steps and decoding to a folder. `benchmarks.run_compiled` runs it with NumPy and JAX alone."""

import gc
import gzip
import platform
from collections.abc import Callable

import tensorflow as tf

from flash_tf import config as configs
from flash_tf import owned_files
from flash_tf.compiling import values
from flash_tf.compiling.manifest import CONFIG, MANIFEST, TOKENIZER, Check, Manifest, Program, read, write
from flash_tf.compiling.programs import Experiment, TokenIds
from flash_tf.config import Config
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training import modelling, run_directory
from flash_tf.training.tasks import objective_of
from flash_tf.training.update import COLUMNS

CHECK_LENGTH, CHECK_STEPS = 1024, 3
GZIPPED_FROM = 2**20  # bytes of a text
DECODE_BATCH, DECODE_TOKENS = 1, 64  # a call of decoding: texts by default, and tokens of each
STEP, CHECKED, DECODE = (f"{name}.hlo.pb" for name in ("step", "check", "decode"))
STABLEHLO = ("step.stablehlo.mlir", "step.stablehlo.mlir.gz")
WRITER = "flash-tf compile"


def resolve(config: Config) -> tuple[Config, Tokenizer | TokenIds]:
    """The config with its masking written out, and its tokenizer, or the ids of a tokenizer that is not trained yet.

    Raises:
      ValueError: The config cannot be exported.
    """
    config = modelling.with_masking(config)
    if objective_of(config).encoder_of(config, None) is not None:
        raise ValueError(f"an exported step reads documents, and this {config.model['type']} reads labelled examples")
    if config.init_from is not None:
        raise ValueError("an exported step starts from new weights: init_from needs `flash-tf train`")
    needed, path = config.model["vocabulary_size"], config.data.tokenizer
    if isinstance(path, str):
        return config, Tokenizer.load(path, needed)
    if config.masking is not None and config.masking.whole_words:
        raise ValueError(
            "masking.whole_words needs data.tokenizer as a file: the tokenizer decides which pieces begin a word"
        )
    return config, TokenIds(needed)


def export(
    name: str,
    experiment: Experiment,
    out: str,
    check_tokens: int | None,
    report: Callable[[str], None],
    decode_batch: int | None = None,
) -> dict:
    """Writes an artifact.

    Args:
      name: Name of the config, for the manifest.
      experiment: The experiment to export. The check trains its variables.
      out: A folder that is new, empty or an older artifact, which is replaced.
      check_tokens: Tokens of the check's batch; None for one sequence of 1,024 tokens, or of n if n is less.
      report: Called with a line before each stage.
      decode_batch: Texts that a model decodes together; None for one. Only for models that decode.

    Returns:
      The sizes of the `files`, `parameters`, `tokens_per_step`, `flops_per_step` and `check_losses`.

    Raises:
      ValueError: The folder holds something else, the check's tokens make no batch, or `decode_batch` is not valid.
    """
    check_size, decoded = _check_size(experiment.config, check_tokens), _decoded(experiment, decode_batch)
    with owned_files.replacing(out, WRITER, _older) as folder:
        return _write(name, experiment, folder, check_size, decoded, report)


def check_folder(out: str) -> None:
    """Raises a ValueError if the folder `out` holds anything except an older artifact."""
    owned_files.check_folder(out, WRITER, _older)


def _write(name, experiment, folder, check_size, decoded, report):
    config, tokenizer = experiment.config, experiment.tokenizer
    n, batch_size = config.data.sequence_length, config.batch_size

    report(f"tracing the training step, {batch_size:,} x {n:,} tokens")
    traced = experiment.trace_step(batch_size, n, stablehlo=True)
    text = _write_text(folder, traced.stablehlo)
    flops = modelling.training_flops_per_step(config, experiment.model)
    programs = {"step": _write_program(folder, STEP, traced, (batch_size, n), "record", stablehlo=text, flops=flops)}
    report(f"tracing the check, {check_size[0]:,} x {check_size[1]:,} tokens")
    traced = experiment.trace_step(*check_size)
    programs["check"] = _write_program(folder, CHECKED, traced, check_size, "record")
    if decoded is not None:
        report(f"tracing decoding, {decoded[0]:,} x {decoded[1]:,} tokens")
        traced = experiment.trace_decode(*decoded)
        programs["decode"] = _write_program(folder, DECODE, traced, decoded, "chosen", capacity=experiment.capacity)
    del traced
    gc.collect()  # the graph of a large model is as big as its weights, and refers to itself

    (folder / CONFIG).write_text(configs.dump(config))
    if isinstance(config.data.tokenizer, str):
        tokenizer.save(str(folder / tokenizer.file))
    manifest = Manifest(
        name=name,
        config=configs.to_mapping(config),
        versions=run_directory.versions(),
        task=config.model["type"],
        vocabulary_size=config.model["vocabulary_size"],
        parameters=experiment.parameters,
        ids={"pad": tokenizer.pad_id, "eos": tokenizer.eos_id, "cls": tokenizer.cls_id},
        overlap=experiment.objective.overlap,
        align=experiment.model.align,
        columns=COLUMNS,
        seed=config.train.seed,
        numbers=values.fingerprint(config.train.seed),
        programs=programs,
        check=_run_check(experiment, check_size, report),
    )
    write(manifest, str(folder))
    return {
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "parameters": manifest.parameters,
        "tokens_per_step": programs["step"].tokens,
        "flops_per_step": programs["step"].flops,
        "check_losses": list(manifest.check.losses),
    }


def as_text(exported: dict) -> str:
    """The result of `export` as a table for people."""
    rows = [(name, f"{size / 2**20:,.2f} MiB") for name, size in exported["files"].items()]
    rows += [
        ("parameters", f"{exported['parameters'] / 1e6:,.2f} M"),
        ("tokens a step", f"{exported['tokens_per_step']:,}"),
        ("model FLOPs a step", f"{exported['flops_per_step'] / 1e12:,.3f} T"),
        ("losses of the check", ", ".join(f"{loss:.4f}" for loss in exported["check_losses"])),
    ]
    return "\n".join(f"{name:<26}{value}" for name, value in rows)


def _check_size(config, tokens):
    """The number of sequences in the check's batch, and their length."""
    n, accumulate = config.data.sequence_length, config.train.accumulate
    length = min(n, CHECK_LENGTH) if tokens is None else min(n, tokens // accumulate)
    batch_size = accumulate if tokens is None else tokens // max(length, 1)
    if length < 1 or (tokens is not None and batch_size * length != tokens) or batch_size % accumulate:
        raise ValueError(
            f"--check-tokens must be a multiple of data.sequence_length ({n}) x train.accumulate ({accumulate}), or "
            f"{accumulate} shorter sequences, got {tokens}"
        )
    return batch_size, length


def _decoded(experiment, batch_size):
    """Texts and tokens of a call of decoding; None if the model does not decode."""
    model, capacity = experiment.model, experiment.capacity
    if (obstacle := model.obstacle) is not None:
        if batch_size is not None:
            raise ValueError(
                f"--decode-batch needs a model that decodes, {experiment.config.model['type']} does not: {obstacle}"
            )
        return None
    batch_size = DECODE_BATCH if batch_size is None else batch_size
    if batch_size < 1:
        raise ValueError(f"--decode-batch must be positive, got {batch_size}")
    return batch_size, DECODE_TOKENS if capacity is None else min(DECODE_TOKENS, capacity)


def _older(folder):
    """The files of an artifact from before there were hashes, by the names in its manifest."""
    try:
        found = read(folder)
    except ValueError:
        return ()
    named = {name for program in found.programs.values() for name in (program.file, program.stablehlo) if name}
    return {MANIFEST, CONFIG, *named} | ({TOKENIZER} if found.config["data"]["tokenizer"] else set())


def _write_text(folder, text):
    plain, gzipped = STABLEHLO
    data = text.encode()
    if len(data) < GZIPPED_FROM:
        (folder / plain).write_bytes(data)
        return plain
    (folder / gzipped).write_bytes(gzip.compress(data, mtime=0))
    return gzipped


def _write_program(folder, file, traced, size, result, **known):
    """Writes a traced program; `known` are further fields of `Program`."""
    (folder / file).write_bytes(traced.serialized)
    batch_size, n = size
    return Program(
        file=file,
        arguments=traced.arguments,
        results=(result,),
        replaces=traced.replaces,
        batch_size=batch_size,
        sequence_length=n,
        tokens=batch_size * n,
        **{"stablehlo": None, "flops": None, **known},
    )


def _run_check(experiment, size, report):
    """The first losses that TensorFlow computes.

    It computes without XLA, to be independent of the compiler. With dropout it uses XLA: the masks differ otherwise.
    """
    config = experiment.config
    shapes = {argument.name: argument.shape for argument in experiment.batch(*size)}
    batch = values.made_up(shapes, config.model["vocabulary_size"], config.train.seed)
    report("making the initial values")
    experiment.assign_initial_values()
    step = tf.function(experiment.train_step, autograph=False, jit_compile=experiment.draws)
    rate, losses = config.optimizer.learning_rate, []
    for done in range(CHECK_STEPS):
        report(f"TensorFlow's step {done + 1} of {CHECK_STEPS} of the check")
        record = step(batch, tf.constant(done, tf.int64), tf.constant(rate, tf.float32))
        losses.append(float(record[COLUMNS.index("loss")]))
    return Check(losses=tuple(losses), rate=rate, device=f"CPU, {platform.processor() or platform.machine()}")
