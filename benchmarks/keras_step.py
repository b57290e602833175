"""A config's training step through Keras on JAX, without TensorFlow. Attention is one kernel there on a GPU.

The model, its loss and its initial distributions are the same as in `flash-tf train`. AdamW is Keras's own, at the peak
learning rate.
"""

import dataclasses
import functools
import itertools
import math
import time
from typing import Any

import jax
import keras
import numpy as np
from keras import ops

from benchmarks import device as devices
from flash_tf.compiling.values import likely_tokens
from flash_tf.config import Config
from flash_tf.training import modelling
from kernels_xla.common.cross_entropy import cross_entropy

WARM_UP, BATCHES = 3, 4  # steps; different batches
EOS, MASK = 1, 3  # ids, as a tokenizer of the package has them
CHECKED = 1024  # tokens
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
      `last_loss`, `parameters`, and `devices.timing`'s.

    Raises:
      GradientError: A gradient is wrong. Nothing was timed.
      ValueError: The config has a training option that this step lacks.
    """
    _check(config)
    keras.utils.set_random_seed(config.train.seed)
    model = modelling.make_model(config)
    error = _gradient_error(config, model)
    optimizer = _optimizer(config, model)
    rows = config.batch_size
    batches = [jax.device_put(_batch(config, rows, seed)) for seed in range(BATCHES)]
    state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
    fixed = [v.value for v in model.non_trainable_variables]

    def step(state, fixed, batch):
        weights, slots = state
        loss, gradients = jax.value_and_grad(functools.partial(_loss, model))(weights, fixed, batch)
        return optimizer.stateless_apply(slots, gradients, weights), loss

    start = time.perf_counter()
    run = jax.jit(step, donate_argnums=0).lower(state, fixed, batches[0]).compile()
    compile_s, ends, before = time.perf_counter() - start, [], None
    for done in range(WARM_UP + steps + 1):
        (weights, slots), loss = run(state, fixed, batches[done % BATCHES])
        state = weights, slots
        if before is not None:
            last = float(before)  # the loss of the step before, while this step runs
            ends.append(time.perf_counter())
        before = loss
    milliseconds = [1e3 * (b - a) for a, b in itertools.pairwise(ends)][-steps:]
    memory, n = run.memory_analysis(), config.data.sequence_length
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    known = jax.devices()[0].device_kind if config.train.precision == "mixed_bfloat16" else ""
    return {
        "gradient_error": error,
        "compile_s": compile_s,
        "peak_bytes": memory.argument_size_in_bytes + results + memory.temp_size_in_bytes,
        "last_loss": last,
        "parameters": sum(math.prod(v.shape) for v in model.trainable_variables),
        **devices.timing(
            milliseconds, tokens=rows * n, flops=modelling.training_flops_per_step(config, model), device=known
        ),
    }


def _check(config):
    taken = {"train.accumulate": 1, "data.packing": "concatenate", "model.dropout": 0}
    given = {"train.accumulate": config.train.accumulate, "data.packing": config.data.packing}
    given["model.dropout"] = config.model.get("dropout", 0)
    for name, value in given.items():
        if value != taken[name]:
            raise ValueError(f"the step on JAX takes {name}={taken[name]} alone, got {value}")
    if config.train.jit_compile is False:
        raise ValueError("the step on JAX is compiled whole: train.jit_compile must not be false")


def _optimizer(config, model):
    wanted = config.optimizer
    optimizer = keras.optimizers.AdamW(
        wanted.learning_rate,
        weight_decay=wanted.weight_decay,
        beta_1=wanted.betas[0],
        beta_2=wanted.betas[1],
        epsilon=wanted.epsilon,
        global_clipnorm=wanted.clip and wanted.clip.norm,
    )
    optimizer.exclude_from_weight_decay([v for v in model.trainable_variables if len(v.shape) < 2])
    optimizer.build(model.trainable_variables)
    return optimizer


def _loss(model, weights, fixed, batch):
    """The mean negative log-likelihood, as in `flash_tf.training.objective`."""
    variables = [*zip(model.trainable_variables, weights, strict=True)]
    variables += zip(model.non_trainable_variables, fixed, strict=True)
    with keras.StatelessScope(state_mapping=variables):
        x = model.encode(**batch["inputs"], training=True)
        labels = ops.reshape(batch["labels"], (-1,))
        head = model.head_weights, None if model.output_bias is None else model.output_bias.value
        loss = cross_entropy(ops.reshape(x, (-1, model.width)), *head, labels, ops.ones(labels.shape))
    return loss / labels.shape[0]


def _batch(config, rows, seed):
    n, vocabulary_size = config.data.sequence_length, config.model["vocabulary_size"]
    tokens = likely_tokens(vocabulary_size, EOS, seed, rows * (n + 1)).reshape(rows, n + 1)
    if config.masking is None:
        return {"inputs": {"token_ids": tokens[:, :-1]}, "labels": tokens[:, 1:]}
    order = np.argsort(np.random.default_rng(seed).random((rows, n)), axis=1).astype(np.int32)
    tokens, at = tokens[:, :-1].copy(), np.sort(order[:, : modelling.predicted(config)], axis=1)
    labels = np.take_along_axis(tokens, at, axis=1)
    np.put_along_axis(tokens, at, MASK, axis=1)
    return {"inputs": {"token_ids": tokens, "masked_positions": at}, "labels": labels}


def _gradient_error(config, model):
    """The worst relative error of a matrix's gradient, over `CHECKED` tokens, or one sequence if it is longer."""
    batch = _batch(config, max(1, CHECKED // config.data.sequence_length), config.train.seed)
    weights = [v.value for v in model.trainable_variables]
    fixed = [v.value for v in model.non_trainable_variables]
    gradients = lambda of: jax.jit(jax.grad(functools.partial(_loss, of)))(weights, fixed, batch)  # noqa: E731
    with jax.default_matmul_precision("highest"):
        in_float32 = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="float32"))
        right = gradients(modelling.make_model(in_float32))
    pairs = zip(model.trainable_variables, gradients(model), right, strict=True)
    errors = {v.path: _relative(found, wanted) for v, found, wanted in pairs if len(v.shape) > 1}
    name = worst(errors)
    if not errors[name] < GRADIENT_ERROR:  # written so that NaN fails too
        raise GradientError(
            f"the gradient of {name} differs from float32's by {errors[name]:.2g}, more than {GRADIENT_ERROR}"
        )
    return errors[name]


def worst(errors: dict[str, float]) -> str:
    """The name of the largest error; NaN counts as the largest."""
    return max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])


def _relative(found, right):
    found, right = (np.asarray(x, np.float64) for x in (found, right))
    return float(np.linalg.norm(found - right) / max(np.linalg.norm(right), 1e-12))
