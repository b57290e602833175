"""The training step: gradients, their mean over replicas, clipping, the update."""

import keras
import tensorflow as tf

from flash_tf.config import Config
from flash_tf.training.optimizer import AdamW

# The gradient norm is of the mean gradient over all replicas: before global clipping, after a replica's own.
COLUMNS = ("loss", "gradient_norm", "learning_rate", "predicted_tokens")  # of a step's record


def uses_xla(config: Config, model: keras.Model) -> bool:
    """Whether XLA compiles forward and backward: as the configuration says, or where it was measured to be faster.

    That is on a GPU, and on a CPU for causal models, by 8 to 16 %; masked ones lose 3 to 16 % there
    (`docs/performance.md`). A TPU's strategy compiles the whole replica function anyway.
    """
    if config.train.jit_compile != "auto":
        return config.train.jit_compile
    return model.causal or bool(tf.config.list_logical_devices("GPU"))


class TrainStep:
    """One step on one replica.

    The loss is the mean over all predicted tokens of the global batch, so that it does not depend on how many replicas
    share it.

    Args:
      model: A built language model.
      objective: Gives the negative log-likelihoods.
      optimizer: Updates the model's variables.
      config: The experiment.
      jit_compile: Whether XLA compiles `gradients`, on each replica; what surrounds a step may compile it whole.

    Attributes:
      seeds: The state of each dropout layer, which a step sets before anything draws from it.
    """

    def __init__(self, model: keras.Model, objective, optimizer: AdamW, config: Config, jit_compile: bool = False):
        self.model, self.objective, self.optimizer, self._config = model, objective, optimizer, config
        self._variables = list(optimizer.variables.values())
        self.seeds = [layer.seed_generator.state for layer in dropouts(model)]
        self._gradients = tf.function(self.gradients, jit_compile=True) if jit_compile else self.gradients

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: dict[str, tf.Tensor], step: tf.Tensor, rate: tf.Tensor | None = None) -> tf.Tensor:
        """Trains on this replica's share of the batch; call it in replica context.

        Args:
          batch: Its rows.
          step: Steps done before, int64.
          rate: Learning rate, float32; the schedule's where it is not given.

        Returns:
          The record of the step, float32 `[COLUMNS]`, the same on every replica.
        """
        context = tf.distribute.get_replica_context()
        self._seed_dropout(step, context)
        share = self._config.batch_size // context.num_replicas_in_sync  # which several workers' input leaves open
        batch = {name: tf.ensure_shape(x, [x.shape[0] or share, *x.shape[1:]]) for name, x in batch.items()}
        gradients, loss, tokens = self._accumulated(batch)
        all_loss, all_tokens = context.all_reduce(tf.distribute.ReduceOp.SUM, [loss, tokens])
        gradients = self._mean(gradients, tokens, all_tokens)
        gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        norm = tf.linalg.global_norm(gradients)
        clip = self._config.optimizer.clip
        if clip is not None and clip.scope == "global":
            gradients, _ = tf.clip_by_global_norm(gradients, clip.norm, use_norm=norm)
        rate = self.optimizer.rate(step) if rate is None else rate
        self.optimizer.apply(gradients, step, rate)
        return tf.stack([all_loss / tf.maximum(all_tokens, 1), norm, rate, all_tokens])

    def _mean(self, gradients, tokens, all_tokens):
        """This replica's part of the mean gradient; under clip scope `replica`, its own mean is clipped first."""
        clip = self._config.optimizer.clip
        if clip is not None and clip.scope == "replica":
            own = [g / tf.maximum(tokens, 1) for g in gradients]
            own, _ = tf.clip_by_global_norm(own, clip.norm)
            return [g * (tokens / tf.maximum(all_tokens, 1)) for g in own]
        return [g / tf.maximum(all_tokens, 1) for g in gradients]

    def _accumulated(self, batch):
        """Sums of gradients, loss and tokens over the replica's batch, taken in `accumulate` micro-batches."""
        parts = self._config.train.accumulate
        if parts == 1:
            return self._gradients(batch)
        split = {name: tf.split(x, parts) for name, x in batch.items()}
        total = None
        for i in range(parts):
            part = self._gradients({name: pieces[i] for name, pieces in split.items()})
            total = part if total is None else tf.nest.map_structure(tf.add, total, part)
        return total

    def gradients(self, batch: dict[str, tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Gradients of the summed loss, the summed loss, and the number of predicted tokens, float32."""
        with tf.GradientTape() as tape:
            loss, tokens = self.objective.loss(self.model, batch)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, self._variables)]
        return gradients, loss, tokens

    def _seed_dropout(self, step, context):
        """Makes dropout a function of seed, step and replica alone: nothing random needs a place in a checkpoint."""
        train, replica = self._config.train, tf.cast(context.replica_id_in_sync_group, tf.int64)
        draws = (tf.cast(step, tf.int64) * context.num_replicas_in_sync + replica) * train.accumulate
        for i, state in enumerate(self.seeds):
            first = (train.seed * 1_000_003 + i) % 2**31
            seed = tf.stack([tf.constant(first, tf.int64), draws % 2**31])
            state.value.assign(tf.cast(seed, state.value.dtype))


def dropouts(model: keras.Model) -> list[keras.layers.Dropout]:
    """The layers of a model that draw random numbers in training."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dropout) and layer.rate > 0]
