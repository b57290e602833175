"""What `flash-tf profile` runs and captures: a few steps of training, or of reading or writing text."""

import dataclasses
import gc
import os
import tempfile
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from flash_tf import config as configs
from flash_tf.config import Config
from flash_tf.generation import greedy
from flash_tf.profiling.capture import Capture
from flash_tf.profiling.latency import Work
from flash_tf.profiling.operations import memory_of
from flash_tf.training import loop, modelling, profiled, run_directory
from flash_tf.training.progress import Progress
from flash_tf.training.step import uses_xla

MODES = ("train", "prefill", "decode")
WARM = 3  # steps before those captured: the first traces and compiles, the next fill buffers
AHEAD = 8  # batches beyond the last step, so that input is prepared to the end
DECODED = 64  # tokens of each row that a step of decoding writes, in one call, as an artifact's


def load(name: str, overrides: list[str]) -> tuple[Config, str | None]:
    """The config of that name, or of that model directory; and the directory.

    Raises:
      ValueError: When it is neither, or a model directory with overrides.
    """
    if not tf.io.gfile.isdir(name):
        return configs.load(name, overrides), None
    if not tf.io.gfile.exists(f"{name}/{run_directory.CONFIG}"):
        raise ValueError(
            f"profile needs a config or a model directory, and the folder {name} has no {run_directory.CONFIG}"
        )
    if overrides:
        raise ValueError(f"--set overrides a config, and {name} is a model directory: give the config that it is of")
    return run_directory.load_config(name), name.rstrip("/")


def profile(
    config: Config, mode: str, *, model_dir: str | None, folder: str, steps: int, rows: int, progress: Progress
):
    """Runs a few steps, captures them into a folder and returns what they cost; see `latency.summarize`.

    Args:
      config: The experiment.
      mode: One of MODES.
      model_dir: Whose tokenizer and tokens training reads; None to make them.
      folder: Where trace and `latency.json` go.
      steps: How many are captured, 1 or more.
      rows: Texts that are read or written together.
      progress: Where it says what it does.

    Raises:
      ValueError: For bad input, in one line.
    """
    if steps < 1:
        raise ValueError(f"--steps must be 1 or more, got {steps}")
    if rows < 1:
        raise ValueError(f"--batch must be 1 or more, got {rows}")
    if mode == "train":
        return _train(config, model_dir, folder, steps, progress)
    config = modelling.with_masking(config)
    model = modelling.make_model(config)
    _check_reads(mode, config, model)
    call, work = {"prefill": _prefill, "decode": _decode}[mode](config, model, rows)
    return _captured(call, work, folder, steps, progress)


def _train(config, model_dir, folder, steps, progress):
    """Trains in a folder of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        try:
            return _trained(_cut_short(config, model_dir, steps), scratch, folder, steps, progress)
        finally:
            gc.collect()  # the input's iterator: one that is there when Python ends keeps it from ending


def _trained(config, scratch, folder, steps, progress):
    run, stream, trainer = loop.prepare(config, scratch, progress)
    work = profiled.training_work(run.config, run.model, run.strategy)

    def analyse():
        return None if tf.config.list_logical_devices("TPU") else _program_bytes(run, stream, trainer, progress)

    with loop.errors_of(stream):
        return _captured(lambda: trainer.train(tf.constant(1)), work, folder, steps, progress, analyse)


def _cut_short(config, model_dir, steps):
    """The experiment with no more steps than are needed, so that no more of the text is tokenised either."""
    train = dataclasses.replace(config.train, steps=WARM + steps + AHEAD)
    data = config.data
    if model_dir is not None:
        tokens = data.cache or f"{os.path.abspath(model_dir)}/tokens"
        data = dataclasses.replace(data, tokenizer=f"{model_dir}/{run_directory.TOKENIZER}", cache=tokens)
    return dataclasses.replace(config, train=train, data=data, profile=None)


def _captured(
    call: Callable[[], object],
    work: Work,
    folder: str,
    steps: int,
    progress: Progress,
    program_bytes: Callable[[], int | None] = lambda: None,
) -> dict:
    progress.line(f"{WARM} steps to make ready, then {steps} to capture")
    for _ in range(WARM):
        call()
    capture = Capture(folder, work.mode)
    try:
        for number in range(1, steps + 1):
            with capture.step(number):
                call()
    except BaseException:
        capture.discard()
        raise
    return profiled.report(capture, work, program_bytes)


def _program_bytes(run, stream, trainer, progress):
    """Peak of a micro-batch's gradients on one replica as XLA would compile them, where the step runs without it."""
    progress.line("asking XLA how much memory such a step takes")
    share = run.config.batch_size // run.strategy.num_replicas_in_sync // run.config.train.accumulate
    spec = stream.dataset(0, share).element_spec
    gradients = lambda *batch: trainer.step.gradients(dict(zip(spec, batch, strict=True)))  # noqa: E731
    ir = tf.function(gradients, jit_compile=True, autograph=False).experimental_get_compiler_ir(*spec.values())
    return memory_of(ir(stage="optimized_hlo_proto_serialized"))


def _check_reads(mode: str, config: Config, model: keras.Model) -> None:
    if not model.causal:
        raise ValueError(f"--mode {mode} needs a causal language model, got {config.model['type']}")
    if (obstacle := model.obstacle) is not None:
        raise ValueError(f"--mode {mode} needs a model that decodes, this one does not: {obstacle}")


def _prefill(config, model, rows):
    """Reads a prompt of the config's length: made-up tokens in, the logits after the last of them out."""
    n, capacity = config.data.sequence_length, _capacity(config, model)
    draw = np.random.default_rng(config.train.seed)
    tokens = tf.constant(draw.integers(0, model.vocabulary_size, (rows, n)), tf.int32)

    @tf.function(jit_compile=uses_xla(config, model), autograph=False)
    def read(tokens):
        return model.extend(tokens, model.initial_state(rows, capacity), last=True)

    flops = rows * model.flops(n, 1)
    work = profiled.work(config, "prefill", flops=flops, tokens=rows * n, replicas=1)
    return lambda: read(tokens)[0].numpy(), work


def _decode(config, model, rows):
    """Writes the same tokens from an empty state in every step."""
    count, capacity = min(DECODED, config.data.sequence_length), _capacity(config, model)
    state, first = model.initial_state(rows, capacity), tf.zeros((rows,), tf.int32)

    @tf.function(jit_compile=uses_xla(config, model), autograph=False)
    def write(tokens, state):
        return greedy(model, tokens, state, count)

    flops = rows * model.flops(count, count)
    work = profiled.work(config, "decode", flops=flops, tokens=rows * count, replicas=1, rows=rows)
    return lambda: write(first, state)[0].numpy(), work


def _capacity(config, model):
    """Tokens that a state has room for; None where it does not grow."""
    return config.data.sequence_length if model.grows else None
