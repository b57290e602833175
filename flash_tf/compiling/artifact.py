"""Training steps and decoding as a folder of files, which `benchmarks.run_compiled` runs with NumPy and JAX alone."""

import gc
import gzip
import os
import platform
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from flash_tf import config as configs
from flash_tf.compiling import values
from flash_tf.compiling.manifest import CONFIG, MANIFEST, TOKENIZER, Check, Manifest, Program, write
from flash_tf.compiling.programs import Experiment, TokenIds
from flash_tf.config import Config
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training import modelling, run_directory
from flash_tf.training.loop import EVALUATED_AT_ONCE
from flash_tf.training.restore import check_vocabulary
from flash_tf.training.step import COLUMNS

Report = Callable[[str], None]

CHECK_LENGTH, CHECK_STEPS = 1024, 3
GZIPPED_FROM = 2**20  # bytes of a text
DECODE_BATCH, DECODE_TOKENS = 1, 64  # a call of decoding: rows by default, and tokens of each
STEP, FORWARD, CHECKED, DECODE = (f"{name}.hlo.pb" for name in ("step", "forward", "check", "decode"))
STABLEHLO = ("step.stablehlo.mlir", "step.stablehlo.mlir.gz")
OURS = {STEP, FORWARD, CHECKED, DECODE, *STABLEHLO, MANIFEST, f"{MANIFEST}.partial", CONFIG, TOKENIZER}


def prepare(config: Config) -> tuple[Config, Tokenizer | TokenIds]:
    """A config ready to be traced, and what it says about tokens.

    Raises:
      ValueError: When it cannot be exported.
    """
    config = modelling.with_masking(config)
    if config.train.seed < 0:
        raise ValueError(f"train.seed of an exported step must not be negative, got {config.train.seed}")
    needed, place = config.model["vocabulary_size"], config.data.tokenizer
    if place is not None:
        tokenizer = Tokenizer.load(place)
        check_vocabulary(tokenizer, needed, place)
        return config, tokenizer
    if config.masking is not None and config.masking.whole_words:
        raise ValueError("masking.whole_words needs data.tokenizer: it decides which pieces begin a word")
    return config, TokenIds(needed)


def export(
    name: str,
    experiment: Experiment,
    out: str,
    check_tokens: int | None,
    report: Report,
    decode_batch: int | None = None,
) -> dict:
    """Writes an artifact.

    Args:
      name: The config's, for the record.
      experiment: What to export; its variables come to hold what the check leaves in them.
      out: A folder that is new, empty or an artifact, which is replaced.
      check_tokens: Tokens of the check's batch; None for one sequence of 1,024, or of n where that is less.
      report: Called with a line about what comes next.
      decode_batch: Rows that are decoded together, of a model that decodes; None for one.

    Returns:
      The sizes of the `files`, `parameters`, `tokens_per_step`, `flops_per_step` and `check_losses`.

    Raises:
      ValueError: When the folder holds something else, the check's tokens make no batch, or `decode_batch` is none.
    """
    config, tokenizer = experiment.config, experiment.tokenizer
    check_size, decoded = _check_size(config, check_tokens), _decoded(experiment, decode_batch)
    folder = _claim(out)
    n, rows = config.data.sequence_length, config.batch_size
    at_once = min(max(1, EVALUATED_AT_ONCE // n), rows)

    report(f"tracing the training step, {rows:,} x {n:,} tokens")
    traced = experiment.trace_step(rows, n, stablehlo=True)
    text = _write_text(folder, traced.stablehlo)
    flops = modelling.training_flops_per_step(config, experiment.model)
    programs = {"step": _write_program(folder, STEP, traced, (rows, n), "record", stablehlo=text, flops=flops)}
    report(f"tracing the evaluation, {at_once:,} x {n:,} tokens")
    traced = experiment.trace_forward(at_once, n)
    programs["forward"] = _write_program(folder, FORWARD, traced, (at_once, n), "sums")
    report(f"tracing the check, {check_size[0]:,} x {check_size[1]:,} tokens")
    traced = experiment.trace_step(*check_size)
    programs["check"] = _write_program(folder, CHECKED, traced, check_size, "record")
    if decoded is not None:
        report(f"tracing decoding, {decoded[0]:,} x {decoded[1]:,} tokens")
        traced = experiment.trace_decode(*decoded)
        programs["decode"] = _write_program(folder, DECODE, traced, decoded, "chosen", capacity=experiment.capacity)
    del traced
    gc.collect()  # graphs of large models take as much as their weights, and refer to themselves

    (folder / CONFIG).write_text(configs.dump(config))
    if config.data.tokenizer is not None:
        tokenizer.save(str(folder / TOKENIZER))
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
    write(manifest, out)
    return {
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name in OURS},
        "parameters": manifest.parameters,
        "tokens_per_step": programs["step"].tokens,
        "flops_per_step": programs["step"].flops,
        "check_losses": list(manifest.check.losses),
    }


def as_text(exported: dict) -> str:
    """`export`'s result as a table for people."""
    rows = [(name, f"{size / 2**20:,.2f} MiB") for name, size in exported["files"].items()]
    rows += [
        ("parameters", f"{exported['parameters'] / 1e6:,.2f} M"),
        ("tokens a step", f"{exported['tokens_per_step']:,}"),
        ("model FLOPs a step", f"{exported['flops_per_step'] / 1e12:,.3f} T"),
        ("losses of the check", ", ".join(f"{loss:.4f}" for loss in exported["check_losses"])),
    ]
    return "\n".join(f"{name:<26}{value}" for name, value in rows)


def _check_size(config, tokens):
    """Sequences and their length in the check's batch."""
    n, parts = config.data.sequence_length, config.train.accumulate
    length = min(n, CHECK_LENGTH) if tokens is None else min(n, tokens // parts)
    rows = parts if tokens is None else tokens // max(length, 1)
    if length < 1 or (tokens is not None and rows * length != tokens) or rows % parts:
        raise ValueError(
            f"--check-tokens must be a multiple of data.sequence_length ({n}) x train.accumulate ({parts}), or "
            f"{parts} shorter sequences, got {tokens}"
        )
    return rows, length


def _decoded(experiment, rows):
    """Rows and tokens of a call of decoding; None where the model does not decode."""
    model, capacity = experiment.model, experiment.capacity
    if (obstacle := model.obstacle) is not None:
        if rows is not None:
            raise ValueError(
                f"--decode-batch needs a model that decodes, {experiment.config.model['type']} does not: {obstacle}"
            )
        return None
    rows = DECODE_BATCH if rows is None else rows
    if rows < 1:
        raise ValueError(f"--decode-batch must be positive, got {rows}")
    return rows, DECODE_TOKENS if capacity is None else min(DECODE_TOKENS, capacity)


def _claim(out):
    """The folder, without an older artifact's files; its manifest goes first, so that no half of one looks whole."""
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out needs a folder, got the file {out}")
    folder.mkdir(parents=True, exist_ok=True)
    foreign = sorted(set(os.listdir(folder)) - OURS)
    if foreign and not (folder / MANIFEST).exists():
        raise ValueError(f"{out} holds something else ({foreign[0]}): --out needs a new folder, or an older artifact")
    for name in sorted(OURS, key=lambda name: name != MANIFEST):
        (folder / name).unlink(missing_ok=True)
    return folder


def _write_text(folder, text):
    plain, gzipped = STABLEHLO
    data = text.encode()
    if len(data) < GZIPPED_FROM:
        (folder / plain).write_bytes(data)
        return plain
    (folder / gzipped).write_bytes(gzip.compress(data, mtime=0))
    return gzipped


def _write_program(folder, file, traced, size, result, **known):
    """Writes it; `known` are what other fields of `Program` there are to fill."""
    (folder / file).write_bytes(traced.serialized)
    rows, n = size
    return Program(
        file=file,
        arguments=traced.arguments,
        results=(result,),
        replaces=traced.replaces,
        batch_size=rows,
        sequence_length=n,
        tokens=rows * n,
        **{"stablehlo": None, "flops": None, **known},
    )


def _run_check(experiment, size, report):
    """The first losses as TensorFlow computes them.

    Without XLA, for a second opinion on the program; but a dropout layer drops other numbers with it than without.
    """
    config, (rows, n) = experiment.config, size
    shapes = {argument.name: argument.shape for argument in experiment.batch(rows, n)}
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
