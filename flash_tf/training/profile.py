"""Profiles a few steps of training or generation for `flash-tf profile`, and the figures of a run's own profile."""

import dataclasses
import gc
import os
import tempfile
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from flash_tf import config as configs
from flash_tf.config import Config
from flash_tf.data.prepared_input import PreparedStream
from flash_tf.generation import greedy
from flash_tf.profiling import latency, trace
from flash_tf.profiling.capture import Capture
from flash_tf.profiling.latency import Work
from flash_tf.profiling.operations import memory_of
from flash_tf.registry import mixer_name
from flash_tf.training import modelling, preflight, run_directory
from flash_tf.training.inputs import tokenizer_of_words
from flash_tf.training.progress import Progress, peak_flops
from flash_tf.training.run import open_stream
from flash_tf.training.strategy import device_name, make_strategy
from flash_tf.training.tensorflow_run import TensorFlowRun, errors_of, make_trainer, open_run
from flash_tf.training.trainer import longest_loop, uses_xla

MODES = ("train", "prefill", "decode")
PER_LOOP = 8  # steps of a captured loop on a GPU, where the start of a loop costs the host some milliseconds
WARM = 3  # steps before the captured ones: the first traces and compiles, the next ones fill buffers
UNTRACED = 5  # calls after those, without the profiler, which slows each launch
AHEAD = 8  # batches beyond the last step, so that the input pipeline works to the end
DECODED = 64  # tokens that a step of decoding adds to each text, as in an artifact
PRODUCT = {"CPU": 1024, "GPU": 8192}  # side of the matrices whose product measures a peak


def load(name: str, overrides: list[str]) -> tuple[Config, str | None]:
    """The config of a name or of a model directory, and the directory.

    Raises:
      ValueError: The name is neither, or there are overrides for a model directory.
    """
    if name in configs.names() or not tf.io.gfile.isdir(name):
        return configs.load(name, overrides), None
    if not tf.io.gfile.exists(f"{name}/{run_directory.CONFIG}"):
        raise ValueError(
            f"profile needs a config or a model directory, and the folder {name} has no {run_directory.CONFIG}"
        )
    if overrides:
        raise ValueError(f"--set overrides a config, and {name} is a model directory: give the config of its run")
    return run_directory.load_config(name), name.rstrip("/")


def profile(
    config: Config, mode: str, *, model_dir: str | None, folder: str, steps: int, batch_size: int, progress: Progress
) -> dict:
    """Runs a few steps, captures them into a folder and returns their figures; see `latency.summarize`.

    Args:
      config: The experiment.
      mode: One of MODES.
      model_dir: The model directory whose tokenizer and tokens training reads; None to make them.
      folder: The folder for the trace and `latency.json`.
      steps: Number of steps to capture, 1 or more.
      batch_size: Texts that prefill or decode reads together.
      progress: Shows each stage.

    Raises:
      ValueError: An argument is not valid.
    """
    if steps < 1:
        raise ValueError(f"--steps must be 1 or more, got {steps}")
    if batch_size < 1:
        raise ValueError(f"--batch must be 1 or more, got {batch_size}")
    if mode == "train":
        return _train(config, model_dir, folder, steps, progress)
    config = modelling.with_masking(config)
    model = modelling.make_model(config)
    _check_reads(mode, config, model)
    call, work = {"prefill": _prefill, "decode": _decode}[mode](config, model, batch_size)
    return _capture(call, work, folder, steps, progress)


def _train(config, model_dir, folder, steps, progress):
    """Profiles training in a temporary folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        try:
            per_loop = min(PER_LOOP, longest_loop(config)) if tf.config.list_logical_devices("GPU") else 1
            return _train_in(scratch, _cut_short(config, model_dir, steps, per_loop), folder, steps, per_loop, progress)
        finally:
            gc.collect()  # frees the input's iterator: Python cannot end while it lives


def _train_in(scratch, config, folder, steps, per_loop, progress):
    config = preflight.check(config)
    run = open_run(config, scratch, make_strategy(config.strategy, progress.line), progress)
    stream = open_stream(run, PreparedStream)
    trainer = make_trainer(run, stream)

    def program_bytes():
        return None if tf.config.list_logical_devices("TPU") else _program_bytes(run, stream, trainer, progress)

    with errors_of(stream):
        call = lambda: trainer.train(tf.constant(per_loop))  # noqa: E731
        return _capture(call, training_work(run), folder, -(-steps // per_loop), progress, program_bytes, per_loop)


def _cut_short(config, model_dir, steps, per_loop):
    """The experiment with only the steps that are needed, so that only their text is tokenized."""
    train = dataclasses.replace(config.train, steps=(WARM + UNTRACED + 1) * per_loop + steps + AHEAD)
    data = config.data
    if model_dir is not None:
        if config.strategy.type == "jax":
            raise ValueError(
                f"profile needs a strategy of TensorFlow, and the run has strategy.type=jax: "
                f"profile {model_dir}/{run_directory.CONFIG} with --set strategy.type=one_device"
            )
        tokens = data.cache or f"{os.path.abspath(model_dir)}/tokens"
        tokenizer = model_dir if tokenizer_of_words(config) is None else None
        data = dataclasses.replace(data, tokenizer=tokenizer, cache=tokens)
        config = dataclasses.replace(config, init_from=None)
    return dataclasses.replace(config, train=train, data=data, profile=None)


def _capture(
    call: Callable[[], object],
    work: Work,
    folder: str,
    calls: int,
    progress: Progress,
    program_bytes: Callable[[], int | None] = lambda: None,
    per_call: int = 1,
) -> dict:
    many = [times * per_call for times in (WARM, UNTRACED, calls)]
    progress.line("running {} steps to warm up, then {} without the profiler and {} to capture".format(*many))
    for _ in range(WARM):
        call()
    start = time.perf_counter()
    for _ in range(UNTRACED):
        call()
    untraced = 1e3 * (time.perf_counter() - start) / (UNTRACED * per_call)
    capture = Capture(folder, work.mode)
    try:
        for number in range(calls):
            with capture.step(1 + number * per_call):
                call()
    except BaseException:
        capture.discard()
        raise
    return finish(capture, work, program_bytes, per_call, untraced)


def _program_bytes(run, stream, trainer, progress):
    """Peak memory of a micro-batch's gradients on one replica as an XLA program. The step itself runs without XLA."""
    progress.line("asking XLA for the memory of a step")
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


def _prefill(config, model, batch_size):
    """A step that reads a made-up prompt of the config's length and gives the logits after its last token."""
    n, capacity = config.data.sequence_length, _capacity(config, model)
    draw = np.random.default_rng(config.train.seed)
    tokens = tf.constant(draw.integers(0, model.vocabulary_size, (batch_size, n)), tf.int32)

    @tf.function(jit_compile=uses_xla(config, model), autograph=False)
    def read(tokens):
        return model.extend(tokens, model.initial_state(batch_size, capacity), last=True)

    flops = batch_size * model.flops(n, 1)
    work = step_work(config, "prefill", flops=flops, tokens=batch_size * n, replicas=1)
    return lambda: read(tokens)[0].numpy(), work


def _decode(config, model, batch_size):
    """A step that writes tokens from an empty state, the same in every step."""
    count, capacity = min(DECODED, config.data.sequence_length), _capacity(config, model)
    state, first = model.initial_state(batch_size, capacity), tf.zeros((batch_size,), tf.int32)

    @tf.function(jit_compile=uses_xla(config, model), autograph=False)
    def write(tokens, state):
        return greedy(model, tokens, state, count)

    flops = batch_size * model.flops(count, count)
    tokens = batch_size * count
    work = step_work(config, "decode", flops=flops, tokens=tokens, replicas=1, batch_size=batch_size)
    return lambda: write(first, state)[0].numpy(), work


def _capacity(config, model):
    """Tokens that a state has room for; None if it does not grow."""
    return config.data.sequence_length if model.grows else None


def training_work(run: TensorFlowRun) -> Work:
    """The work of a training step."""
    flops, tokens = modelling.training_flops_per_step(run.config, run.model), run.config.train.tokens_per_step
    return step_work(run.config, "train", flops=flops, tokens=tokens, replicas=run.strategy.num_replicas_in_sync)


def step_work(
    config: Config, mode: str, *, flops: int, tokens: int, replicas: int, batch_size: int | None = None
) -> Work:
    """The work of a step on this machine's devices; see `Work`."""
    device, precision = device_name(), config.train.precision
    peak, peak_of = peak_flops(device, precision, replicas), f"{device}'s datasheet, {precision}"
    if peak is None and device != "TPU":
        peak, size = measured_peak(model_dtype(precision), replicas)
        peak_of = f"measured on a {model_dtype(precision)} product of {size:,} x {size:,} matrices"
    return Work(
        mode=mode,
        model=f"{config.model['type']}, mixer {mixer_name(config.model['mixer'])}",
        tokens=tokens,
        flops=flops,
        replicas=replicas,
        device=device,
        peak=peak,
        peak_of=peak_of,
        batch_size=batch_size,
    )


def model_dtype(precision: str) -> str:
    """The dtype of a model's products under this precision."""
    return "bfloat16" if precision == "mixed_bfloat16" else "float32"


def measured_peak(dtype: str, replicas: int) -> tuple[float, int]:
    """FLOP/s of all replicas, from the best of a few large products, and their size. CPU replicas share the cores."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    size = PRODUCT[kind]
    with tf.device(f"{kind}:0"):
        a = tf.cast(tf.random.stateless_normal((size, size), seed=(0, 0)), dtype)
        times = []
        for _ in range(6):  # the first warms up
            start = time.perf_counter()
            tf.linalg.matmul(a, a)[0, 0].numpy()
            times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times[1:]) * (replicas if kind == "GPU" else 1), size


def finish(
    capture: Capture,
    work: Work,
    program_bytes: Callable[[], int | None] = lambda: None,
    per_mark: int = 1,
    untraced: float | None = None,
) -> dict:
    """Ends a capture and writes its `latency.json`. Returns the file's content.

    Args:
      capture: The capture, with its steps.
      work: The work of a step.
      program_bytes: Gives a step's memory. Called if neither the devices nor the trace report it.
      per_mark: Steps of a mark. Each has the mean times of its mark.
      untraced: The mean time of a step without the profiler, in ms, if it was measured.

    Raises:
      ValueError: The trace is empty.
    """
    found = trace.read(trace.load(capture.stop()), capture.name, per_mark)
    peak = None if capture.peaks or found.program_bytes else program_bytes()
    result = latency.summarize(found, work, capture.peaks, peak, untraced)
    latency.write(result, capture.folder)
    return result
