"""Counts the parameters, FLOPs and bytes of a config's model without allocating it."""

import contextlib
import math
from collections.abc import Iterator

import keras
from keras.src.backend.common import global_state

from flash_tf.config import Config, TokenizerConfig
from flash_tf.registry import mixer_name

REMEMBERED = "uninitialized_variables"


def describe(config: Config, model: keras.Model, predicted: int) -> dict:
    """Parameters, FLOPs and bytes of a model at the config's sequence length.

    Args:
      config: The experiment.
      model: Its model, built. Its weights need not exist, see `without_weights`.
      predicted: Positions of a sequence on which training runs the head.

    Returns:
      `tokenizer`, its file or the kind that is trained; `parameters`, the trainable ones; `forward_flops_per_token` and
      `training_flops_per_token` (three times as many; causal attention counts half, recomputation does not count);
      `decode_state_bytes` of one sequence of this length, in bfloat16 with float32 sums, null if the model does not
      decode; `activation_bytes`, an estimate for the micro-batches that all replicas have at a time;
      `weight_and_optimizer_bytes`, in float32, with weights that are not trained; `hosts`, the addresses of
      `strategy.workers`, null if the config names none.
    """
    n, tokenizer = config.data.sequence_length, config.data.tokenizer
    forward = model.flops(n, predicted) / n
    parameters = _count(model.trainable_variables)
    itemsize = 2 if config.train.precision == "mixed_bfloat16" else 4
    return {
        "model": config.model["type"],
        "mixer": mixer_name(config.model["mixer"]),
        "sequence_length": n,
        "batch_size": config.batch_size,
        "vocabulary_size": config.model["vocabulary_size"],
        "tokenizer": tokenizer if isinstance(tokenizer, str) else f"{(tokenizer or TokenizerConfig()).train}, trained",
        "parameters": parameters,
        "forward_flops_per_token": round(forward),
        "training_flops_per_token": round(3 * forward),
        "decode_state_bytes": model.decode_state_bytes(n),
        "activation_bytes": config.batch_size
        // config.train.accumulate
        * model.activation_bytes(n, predicted, itemsize),
        "weight_and_optimizer_bytes": weight_and_optimizer_bytes(model),
        "hosts": workers if isinstance(workers := config.strategy.workers, list) else None,
    }


def weight_and_optimizer_bytes(model: keras.Model) -> int:
    """Bytes of the weights in float32, and of the optimizer's two numbers for each weight that is trained."""
    return 4 * (3 * _count(model.trainable_variables) + _count(model.non_trainable_weights))


def _count(variables):
    return sum(math.prod(v.shape) for v in variables)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """A scope that builds models with shapes but without values: 500 M parameters take no memory.

    Keras remembers such variables, and gives them values at the end of the next stateless scope of any caller. So this
    scope makes Keras forget them. There is no public function for it.
    """
    before = list(global_state.get_global_attribute(REMEMBERED, []))
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(REMEMBERED, before)


def as_text(described: dict) -> str:
    """The result of `describe` as a table for people."""
    d = described
    state = d["decode_state_bytes"]
    rows = [
        ("model", f"{d['model']}, mixer {d['mixer']}"),
        ("batch", f"{d['batch_size']:,} sequences of {d['sequence_length']:,} tokens"),
        ("vocabulary", f"{d['vocabulary_size']:,} ids, tokenizer {d['tokenizer']}"),
        ("parameters", f"{d['parameters'] / 1e6:,.2f} M"),
        ("FLOPs per token", f"{d['forward_flops_per_token'] / 1e6:,.1f} M forward, "
         f"{d['training_flops_per_token'] / 1e6:,.1f} M training"),
        ("decode state", "does not decode" if state is None else f"{_bytes(state)} a sequence"),
        ("activations", f"{_bytes(d['activation_bytes'])} at a time over all replicas, estimated"),
        ("weights, optimizer", f"{_bytes(d['weight_and_optimizer_bytes'])} on each replica"),
    ]  # fmt: skip
    if d["hosts"]:
        rows.append(("hosts", f"{', '.join(d['hosts'])}, which were not asked"))
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


def _bytes(count):
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,} B"
