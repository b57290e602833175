"""The arithmetic of a training step, in `keras.ops`: clipping, AdamW, its learning rate, and the seeds of dropout."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from flash_tf.config import ClipConfig, OptimizerConfig
from flash_tf.training import schedule
from kernels_xla.common.spec import Tensor

# The metrics in a step's record. The gradient norm is taken before clipping; with clip scope `replica` it is the mean
# of the replicas' own norms.
COLUMNS = ("loss", "gradient_norm", "learning_rate", "predicted_tokens")

LOOP_SECONDS = 4  # the most time between two returns to Python, which shows progress, saves and hears signals


def learning_rate(config: OptimizerConfig, steps: int, step: Tensor) -> Tensor:
    """The learning rate of a step, float32; see `schedule.learning_rate`. `step` counts the steps done before it."""
    return schedule.learning_rate(config, steps, ops.cast(step, "float32"), ops)


def corrections(config: OptimizerConfig, step: Tensor) -> tuple[Tensor, Tensor]:
    """By what AdamW divides its two means, which begin at zero. `step` counts the steps done before it."""
    count = ops.cast(step, "float32") + 1
    return 1 - ops.power(config.betas[0], count), 1 - ops.power(config.betas[1], count)


def adamw(weight, gradient, m, v, *, corrections, rate, betas, epsilon, decay):
    """One update of AdamW (Loshchilov and Hutter, arXiv:1711.05101).

    Args:
      weight: The weight, float32 of any shape; so are `gradient`, `m` and `v`.
      gradient: The weight's gradient.
      m: Running mean of the gradient.
      v: Running mean of the gradient's square.
      corrections: From the function of this name, once for all weights.
      rate: Learning rate.
      betas: Decay rates of the two means.
      epsilon: Added to the root.
      decay: Weight decay, which the rate multiplies.

    Returns:
      The new weight, m and v.
    """
    m = betas[0] * m + (1 - betas[0]) * gradient
    v = betas[1] * v + (1 - betas[1]) * ops.square(gradient)
    mean, square = m / corrections[0], v / corrections[1]
    return weight - rate * (mean / (ops.sqrt(square) + epsilon) + decay * weight), m, v


def updated(
    config: OptimizerConfig, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, corrections, rate
) -> tuple:
    """`adamw` with the options of a config. Only matrices decay: norms, biases, scales and offsets are vectors."""
    decay = config.weight_decay if len(weight.shape) >= 2 else 0.0
    same = {"corrections": corrections, "rate": rate, "betas": config.betas, "epsilon": config.epsilon, "decay": decay}
    return adamw(weight, gradient, m, v, **same)


def clipped_mean(
    clip: ClipConfig | None,
    gradients: Sequence[Tensor],
    loss: Tensor,
    tokens: Tensor,
    *,
    total: Callable[[list], list],
    norm_of: Callable[[Sequence[Tensor]], Tensor],
    replicas: int,
    names: Sequence[str] = (),
    compiled: Callable[[Callable], Callable] = lambda function: function,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The mean gradient over all replicas' tokens, clipped, on each replica.

    With clip scope `replica`, each replica clips its own mean gradient before all are added.

    Args:
      clip: The config's clipping.
      gradients: The replica's sums of gradients.
      loss: The replica's summed loss.
      tokens: The replica's number of predicted tokens, float32.
      total: Sums each entry of a list over all replicas.
      norm_of: The norm of all gradients together.
      replicas: Their number.
      names: The path of each gradient's weight, which scope `layer` needs.
      compiled: Compiles a function of tensors. It gets all work on gradients but `total`, which may not be compiled.

    Returns:
      The gradients, their norm before clipping, the loss and the tokens of all replicas.
    """
    scope = None if clip is None else clip.scope

    def own_norm(gradients, tokens):
        return norm_of(gradients) / ops.maximum(tokens, 1)

    def mean(gradients, own, all_tokens):
        share = 1 / ops.maximum(all_tokens, 1)
        if scope == "replica":
            share = share * clip.norm / ops.maximum(own, clip.norm)
        return [g * share for g in gradients]

    def clipped(gradients, own, all_tokens):
        gradients = mean(gradients, own, all_tokens)
        norm = norm_of(gradients)
        if scope == "global":
            share = clip.norm / ops.maximum(norm, clip.norm)
            gradients = [g * share for g in gradients]
        if scope == "layer":
            gradients = _clipped_by_layer(names, gradients, clip.norm, norm_of)
        return gradients, norm

    own = compiled(own_norm)(gradients, tokens) if scope == "replica" else ops.zeros(())
    loss, all_tokens, norms = total([loss, tokens, own])
    if scope == "replica":
        gradients, norm = total(compiled(mean)(gradients, own, all_tokens)), norms / replicas
    else:
        gradients, norm = compiled(clipped)(total(gradients), own, all_tokens)
    return gradients, norm, loss, all_tokens


def _clipped_by_layer(names, gradients, most, norm_of):
    """The gradients, and each layer's norm is at most `most`. A layer stands under the model: a block, a norm, ..."""
    layers = [name.split("/")[1] for name in names]
    shares = {}
    for layer in dict.fromkeys(layers):
        norm = norm_of([g for g, own in zip(gradients, layers, strict=True) if own == layer])
        shares[layer] = most / ops.maximum(norm, most)
    return [g * shares[layer] for g, layer in zip(gradients, layers, strict=True)]


def accumulated(
    gradients_of: Callable[[dict[str, Tensor], Any], Any],
    batch: dict[str, Tensor],
    accumulate: int,
    zeros: Any,
    fori_loop: Callable = ops.fori_loop,
) -> Any:
    """Sums of what `gradients_of(part, i)` gives for each of `accumulate` equal parts of a replica's batch.

    The parts take turns in a loop. One after the other in the program, they would be compiled as often, and XLA could
    have them in memory together.

    Args:
      gradients_of: From a part and its number to some structure of tensors.
      batch: The replica's windows.
      accumulate: The number of parts.
      zeros: That structure, with zeros.
      fori_loop: Runs the loop, with the arguments of `keras.ops.fori_loop`.
    """
    if accumulate == 1:
        return gradients_of(batch, 0)
    parts = {name: ops.reshape(x, (accumulate, -1, *x.shape[1:])) for name, x in batch.items()}

    def add(i, sums):
        return keras.tree.map_structure(lambda x, y: x + y, sums, gradients_of({n: x[i] for n, x in parts.items()}, i))

    return fori_loop(0, accumulate, add, zeros)


def dropout_seed(seed: int, layer: int, draws: Tensor) -> Tensor:
    """The state of a dropout layer before it draws, so that a checkpoint needs no random state: int32 `[2]`.

    Args:
      seed: The run's.
      layer: The number of the layer.
      draws: Micro-batches that all replicas have drawn for before, an integer; its low 31 bits count.
    """
    first = ops.convert_to_tensor((seed * 1_000_003 + layer) % 2**31, "int32")
    return ops.stack([first, ops.cast(draws & (2**31 - 1), "int32")])


def dropouts(model: keras.Model) -> list[keras.layers.Dropout]:
    """The layers of a model that draw random numbers in training."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dropout) and layer.rate > 0]
