"""The training step of `flash-tf train` with strategy.type jax, bare and in its loop. Needs no TensorFlow."""

import dataclasses
import itertools
import math
import random
import time
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh

from benchmarks import device as devices
from flash_tf import model_stats
from flash_tf.compiling.values import likely_tokens
from flash_tf.config import Config
from flash_tf.data.packing import Packing
from flash_tf.data.prepared import Layout, PreparedSplit, file_name
from flash_tf.training import modelling
from flash_tf.training.objective import OBJECTIVES
from flash_tf.training.on_jax.mesh import make_mesh
from flash_tf.training.on_jax.step import Step
from flash_tf.training.on_jax.trainer import Trainer, sharded

WARM_UP, BATCHES = 3, 4  # steps; different batches
PAD, EOS, MASK, CLS = 0, 1, 3, 4  # ids, as a tokenizer of the package has them
CHECKED = 1024  # tokens
FILES, IN_FILE = 4, 2**20  # of windows on disk; tokens in each
# Worst relative error of a matrix's gradient in bfloat16, which rounds numbers to 4e-3, through all layers. A wrong
# gradient is off by about 1. Vectors are left out: they are sums over all tokens, which may consist of rounding.
GRADIENT_ERROR = 0.1


class GradientError(ValueError):
    """The step's gradients differ from the ones in float32."""


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Compares the gradients with float32, where no kernel is fused, then times whole steps.

    Args:
      config: The experiment's, with its masking.
      steps: How many are timed, after the warm-up.

    Returns:
      `gradient_error`, `compile_s`, `peak_bytes` (arguments, results that take over no argument's memory, temporaries),
      `last_loss`, `parameters`, `devices.timing`'s; `loop_tokens_per_second` of the trainer's loop, which reads its
      batches from prepared files, and `loop_share`, its rate divided by the bare step's.

    Raises:
      GradientError: A gradient is wrong. Nothing was timed.
      ValueError: `train.jit_compile` is false.
    """
    if config.train.jit_compile is False:
        raise ValueError("the step on JAX is compiled whole: train.jit_compile must not be false")
    error = _gradient_error(config)
    step, n = make_step(config), config.data.sequence_length
    with TemporaryDirectory() as folder:
        read = _windows(config, step.model, folder)
        batches = [sharded(step.rows, config.batch_size, _part(read, i * config.batch_size)) for i in range(BATCHES)]
        start = time.perf_counter()
        run = step.program(batches[0])
        compile_s, memory = time.perf_counter() - start, run.memory_analysis()
        milliseconds, last, state = _bare(run, step.first_state(), batches, steps)
        loop = _loop(step, state, read, steps)
    known = jax.devices()[0].device_kind if config.train.precision == "mixed_bfloat16" else ""
    flops = modelling.training_flops_per_step(config, step.model)
    timing = devices.timing(milliseconds, tokens=config.batch_size * n, flops=flops, device=known)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "gradient_error": error,
        "compile_s": compile_s,
        "peak_bytes": memory.argument_size_in_bytes + results + memory.temp_size_in_bytes,
        "last_loss": last,
        "parameters": sum(math.prod(v.shape) for v in step.model.trainable_variables),
        **timing,
        "loop_tokens_per_second": loop,
        "loop_share": loop / (config.batch_size * n * len(milliseconds) / sum(milliseconds) * 1e3),
    }


def make_step(config: Config, mesh: Mesh | None = None) -> Step:
    """The step of a config on a mesh, by default its own, without the tokenizer's file."""
    random.seed(config.train.seed)
    with model_stats.without_weights():
        model = modelling.make_model(config)
    objective = OBJECTIVES[config.model["type"]](config, _tokenizer(config))
    return Step(model, objective, config, mesh or make_mesh(config.strategy))


def _tokenizer(config):
    size, special = config.model["vocabulary_size"], {"pad_id": PAD, "eos_id": EOS, "mask_id": MASK, "cls_id": CLS}
    return types.SimpleNamespace(
        **special, special_ids=(PAD, EOS, MASK, CLS), vocabulary_size=size, starts_word=np.ones(size, bool)
    )


def _bare(run, state, batches, steps):
    """Milliseconds of each step on batches that are on the devices, the last loss, and the state."""
    ends, before = [], None
    for done in range(WARM_UP + steps + 1):
        state, record = run(state, batches[done % BATCHES], np.uint32(done))
        if before is not None:
            last = float(before[0])  # the loss of the step before, while this step runs
            ends.append(time.perf_counter())
        before = record
    return [1e3 * (b - a) for a, b in itertools.pairwise(ends)][-steps:], last, state


def _loop(step, state, read, steps):
    """Tokens a second of the trainer, over several of its loops, with what happens between them."""
    done = keras.Variable(0, dtype="int32", trainable=False)
    trainer = Trainer(step=step, state=state, done=done, read=read)
    trainer.train(1)  # a step alone: the trainer knows no step's time yet
    trainer.train(WARM_UP)
    start, before = time.perf_counter(), int(done.numpy())
    while (now := int(done.numpy()) - before) < steps:
        trainer.train(min(steps - now, trainer.steps_per_loop))
    return steps * step.config.train.tokens_per_step / (time.perf_counter() - start)


def _part(read, position):
    return lambda first, count: read(position + first, count)


def _windows(config, model, folder):
    """Reads windows of made-up tokens from files as `flash-tf prepare` writes them."""
    tokenizer, overlap = _tokenizer(config), int(config.masking is None)
    n = config.data.sequence_length
    packing = Packing(kind="concatenate", sequence_length=n, overlap=overlap, align=model.align)
    layout = Layout.of(packing, tokenizer, windows_per_file=max(1, IN_FILE // n))
    size = layout.windows_per_file
    for number in range(FILES):
        windows = np.zeros(size, layout.record)
        tokens = likely_tokens(config.model["vocabulary_size"], EOS, number, size * (n + overlap))
        windows["tokens"] = tokens.reshape(size, -1)
        windows.tofile(Path(folder) / file_name(number, 0))
    counts = {"documents": 0, "tokens": 0, "words": None, "bytes": 0}
    split = PreparedSplit(folder, layout, {"windows": FILES * size, "files": [1] * FILES, **counts})
    return lambda position, count: split.batch(position, count, config.train.seed)


def _gradient_error(config):
    """The worst relative error of a matrix's gradient, over `CHECKED` tokens, or one sequence if it is longer.

    The optimizer's first mean after one step is a multiple of the gradient.
    """
    optimizer = dataclasses.replace(config.optimizer, clip=None)
    tokens = max(1, CHECKED // config.data.sequence_length) * config.data.sequence_length * jax.device_count()
    train = dataclasses.replace(config.train, tokens_per_step=tokens, accumulate=1)
    config = dataclasses.replace(config, optimizer=optimizer, train=train)
    found, wanted = _means(config), None
    with jax.default_matmul_precision("highest"):
        wanted = _means(dataclasses.replace(config, train=dataclasses.replace(train, precision="float32")))
    errors = {name: _relative(found[name], x) for name, x in wanted.items() if len(x.shape) > 1}
    name = worst(errors)
    if not errors[name] < GRADIENT_ERROR:  # written so that NaN fails too
        raise GradientError(
            f"the gradient of {name} differs from float32's by {errors[name]:.2g}, more than {GRADIENT_ERROR}"
        )
    return errors[name]


def _means(config):
    step = make_step(config)
    with TemporaryDirectory() as folder:
        batch = sharded(step.rows, config.batch_size, _windows(config, step.model, folder))
        state, _ = step.run(step.first_state(), batch, np.uint32(0))
    return {name: np.asarray(x) for name, x in state.items() if name.startswith("m/")}


def worst(errors: dict[str, float]) -> str:
    """The name of the largest error; NaN counts as the largest."""
    return max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])


def _relative(found, right):
    found, right = (np.asarray(x, np.float64) for x in (found, right))
    return float(np.linalg.norm(found - right) / max(np.linalg.norm(right), 1e-12))
