"""Proves an exported step on a device, times it, traces it. Needs NumPy and JAX alone."""

import itertools
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import device as devices
from benchmarks.compiled_program import Compiled, batch_shapes, initial_variables, memory_errors, numbers_of_step
from flash_tf.compiling import values
from flash_tf.compiling.manifest import Manifest

WARM_UP = 3  # steps
TRACED = 4  # steps after those
BATCHES = 4  # different ones: on a device a batch takes the place of nothing that matters
# Relative error of a loss, by precision. Three steps at the peak rate move a loss by tenths. On a CPU, XLA and
# TensorFlow without it differ by 2e-7, or by 1.7e-3 with the 24 layers of FLASH. A GPU multiplies float32 as TF32, with
# a rounding error of 5e-4.
TOLERANCE = {"float32": 1e-3, "mixed_bfloat16": 1e-2}


class ParityError(ValueError):
    """The program's losses on this device differ from TensorFlow's."""


def prove(
    directory: str, manifest: Manifest, device: jax.Device, options: dict[str, object] | None = None
) -> list[float]:
    """Runs the check's steps; returns their losses.

    Raises:
      ParityError: When a loss is not TensorFlow's.
      ValueError: When this NumPy draws other values than the one that exported.
    """
    if values.fingerprint(manifest.seed) != manifest.numbers:
        raise ValueError(
            f"NumPy {np.__version__} draws other initial values than the {manifest.versions['numpy']} that exported"
        )
    program = manifest.programs["check"]
    check = Compiled(directory, program, device, options)
    batch = values.made_up(batch_shapes(program.arguments), manifest.vocabulary_size, manifest.seed)
    batch = {name: jax.device_put(x, device) for name, x in batch.items()}
    variables, losses = initial_variables(manifest, program, device), []
    for done, want in enumerate(manifest.check.losses):
        record = check(variables, {**batch, **numbers_of_step(done, manifest.check.rate, device)})
        losses.append(float(np.asarray(record)[manifest.columns.index("loss")]))
        bar = TOLERANCE[manifest.precision]
        if not abs(losses[-1] - want) <= bar * abs(want):  # written so that NaN fails too
            raise ParityError(
                f"{directory} fails its check: loss {losses[-1]:.6f} at step {done + 1}, TensorFlow's is {want:.6f} "
                f"(within {bar:.0e}); it is not timed"
            )
    return losses


def measure(
    directory: str, manifest: Manifest, device: jax.Device, *, steps: int, options: dict[str, object] | None = None
) -> dict[str, Any]:
    """Proves the step, then times it on tokens with frequencies like a text's.

    Args:
      directory: The artifact's.
      manifest: Its manifest.
      device: Where to run.
      steps: How many are timed, after the warm-up.
      options: XLA's, for both programs.

    Returns:
      A row of a result: what was run, `compile_s`, `check_losses`, `peak_bytes` (arguments, results that take over no
      argument's memory, temporaries), `allocator_peak_bytes` of this process (None on a CPU), `last_loss`, and
      `devices.timing`'s.
    """
    with memory_errors(device, directory):
        losses = prove(directory, manifest, device, options)
        step = Compiled(directory, manifest.programs["step"], device, options)
        milliseconds, last = _times(manifest, step, device, steps)
    program, masking = step.program, manifest.config["masking"]
    n = program.sequence_length
    known = device.device_kind if manifest.precision == "mixed_bfloat16" else ""  # the peaks are of bfloat16
    return {
        "model": manifest.name.split("/")[-1].removesuffix(".yaml"),
        "framework": "TensorFlow",
        "runner": "JAX",
        "task": devices.TASKS[manifest.task],
        "config": manifest.name,
        "n": n,
        "batch": program.batch_size,
        "tokens": program.tokens,
        "predicted": n if masking is None else round(masking["rate"] * n),
        "precision": manifest.precision,
        "parameters": manifest.parameters,
        "xla_options": options or {},
        "check_losses": losses,
        "compile_s": step.seconds,
        "peak_bytes": step.bytes,
        "allocator_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "last_loss": last,
        **devices.timing(milliseconds, tokens=program.tokens, flops=program.flops, device=known),
    }


def trace(
    directory: str, manifest: Manifest, device: jax.Device, file: str, options: dict[str, object] | None = None
) -> None:
    """Writes what JAX's profiler sees of some steps, on a GPU of each of their kernels, to `file`, an XSpace."""
    single = {"xla_gpu_enable_command_buffer": ""}  # a command buffer's kernels would have no names
    with memory_errors(device, directory), tempfile.TemporaryDirectory() as scratch:
        step = Compiled(directory, manifest.programs["step"], device, {**(options or {}), **single})
        with jax.profiler.trace(scratch):
            _times(manifest, step, device, TRACED)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(next(Path(scratch).rglob("*.xplane.pb")), file)


def _times(manifest, step, device, steps):
    """Milliseconds between the completions of steps that are enqueued one ahead; the last loss."""
    program, optimizer = step.program, manifest.config["optimizer"]
    batches = [jax.device_put(_batch(manifest, program, i), device) for i in range(BATCHES)]
    variables, ends, before = initial_variables(manifest, program, device), [], None
    jax.block_until_ready((batches, variables))
    for done in range(WARM_UP + steps + 1):
        rate = optimizer["learning_rate"] * min(1, (done + 1) / max(1, optimizer["warmup_steps"]))
        record = step(variables, {**batches[done % BATCHES], **numbers_of_step(done, rate, device)})
        if before is not None:
            last = np.asarray(before)  # of the step before, while this one is at work
            ends.append(time.perf_counter())
        before = record
    milliseconds = [1e3 * (b - a) for a, b in itertools.pairwise(ends)]
    return milliseconds[-steps:], float(last[manifest.columns.index("loss")])


def _batch(manifest, program, number):
    """A batch of the program, each window one document, with frequencies of tokens like a text's."""
    shapes, size, seed = batch_shapes(program.arguments), manifest.vocabulary_size, manifest.seed + number
    tokens = values.likely_tokens(size, manifest.ids["eos"], seed, math.prod(shapes["tokens"]))
    return {**values.made_up(shapes, size, seed), "tokens": tokens.reshape(shapes["tokens"])}
