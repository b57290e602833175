"""The training step, and the loop of steps inside one tf.function."""

import keras
import orbit
import tensorflow as tf

from flash_tf.config import Config
from flash_tf.training.optimizer import AdamW

# The gradient norm is of the mean gradient over all replicas: before global clipping, after a replica's own.
COLUMNS = ("loss", "gradient_norm", "learning_rate", "predicted_tokens")  # of a step's record


class Trainer(orbit.AbstractTrainer):
    """Forward and backward inside `strategy.run`, under XLA where it pays; the update outside XLA.

    The loss is the mean over all predicted tokens of the global batch, so that it does not depend on how many replicas
    share it.

    Args:
      model: A built language model.
      objective: Gives the negative log-likelihoods.
      optimizer: Updates the model's variables.
      config: The experiment.
      strategy: Under whose scope all of these were made.
      global_step: Steps done.
      dataset: Distributed; gives each replica its share of the batch.
    """

    def __init__(self, *, model, objective, optimizer: AdamW, config: Config, strategy, global_step, dataset):
        self.model, self.objective, self.optimizer, self.strategy = model, objective, optimizer, strategy
        self.global_step = global_step
        self.history = None  # [steps, COLUMNS] of the last loop
        self._config, self._iterator = config, iter(dataset)
        self._variables = list(optimizer.variables.values())
        self._seeds = [layer.seed_generator.state for layer in dropouts(model)]
        use_xla = config.train.jit_compile
        if use_xla == "auto":  # a TPU's strategy compiles the whole replica function anyway
            use_xla = bool(tf.config.list_logical_devices("GPU"))
        self._gradients = tf.function(self.gradients, jit_compile=True) if use_xla else self.gradients
        self._loop = tf.function(self._steps)

    def train(self, num_steps: tf.Tensor) -> dict:
        """Runs `num_steps` steps; returns the means of their records."""
        self.history = self._loop(self._iterator, num_steps).numpy()
        return dict(zip(COLUMNS, self.history.mean(axis=0), strict=True))

    def _steps(self, iterator, num_steps):
        history = tf.TensorArray(tf.float32, size=num_steps, element_shape=[len(COLUMNS)])
        for i in tf.range(num_steps):
            record = self.strategy.run(self._replica_step, args=(next(iterator), self.global_step.read_value()))
            history = history.write(i, self.strategy.experimental_local_results(record)[0])
            self.global_step.assign_add(1)
        return history.stack()

    @tf.autograph.experimental.do_not_convert
    def _replica_step(self, batch, step):
        """One step on one replica; returns the record, the same on every replica."""
        context = tf.distribute.get_replica_context()
        self._seed_dropout(step, context.replica_id_in_sync_group)
        gradients, loss, tokens = self._accumulated(batch)
        all_loss, all_tokens = context.all_reduce(tf.distribute.ReduceOp.SUM, [loss, tokens])
        gradients = self._mean(gradients, tokens, all_tokens)
        gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        norm = tf.linalg.global_norm(gradients)
        clip = self._config.optimizer.clip
        if clip is not None and clip.scope == "global":
            gradients, _ = tf.clip_by_global_norm(gradients, clip.norm, use_norm=norm)
        self.optimizer.apply(gradients, step)
        return tf.stack([all_loss / tf.maximum(all_tokens, 1), norm, self.optimizer.rate(step), all_tokens])

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
            prediction = self.objective(self.model, batch, training=True)
            loss = tf.reduce_sum(prediction.nll * prediction.weights)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, self._variables)]
        return gradients, loss, tf.reduce_sum(prediction.weights)

    def _seed_dropout(self, step, replica):
        """Makes dropout a function of seed, step and replica alone: nothing random needs a place in a checkpoint."""
        train = self._config.train
        draws = (tf.cast(step, tf.int64) * self.strategy.num_replicas_in_sync + tf.cast(replica, tf.int64)) * (
            train.accumulate
        )
        for i, state in enumerate(self._seeds):
            first = (train.seed * 1_000_003 + i) % 2**31
            seed = tf.stack([tf.constant(first, tf.int64), draws % 2**31])
            state.value.assign(tf.cast(seed, state.value.dtype))


def dropouts(model: keras.Model) -> list[keras.layers.Dropout]:
    """The layers of a model that draw random numbers in training."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dropout) and layer.rate > 0]
