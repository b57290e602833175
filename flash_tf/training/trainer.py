"""The training step, and the loop of steps inside one tf.function."""

import contextlib
import time

import keras
import orbit
import tensorflow as tf

from flash_tf.config import Config
from flash_tf.training.optimizer import AdamW

# The metrics in a step's record. The gradient norm is the norm of the mean gradient over all replicas: before global
# clipping, but after clipping by replica.
COLUMNS = ("loss", "gradient_norm", "learning_rate", "predicted_tokens")


def uses_xla(config: Config, model: keras.Model) -> bool:
    """Whether XLA compiles forward and backward. "auto" chooses the faster way by our measurements.

    XLA is faster on a GPU. On a CPU causal models gain 8 to 16 % and masked models lose 3 to 16 %
    (`docs/performance.md`). A TPU's strategy compiles the whole replica function anyway.
    """
    if config.train.jit_compile != "auto":
        return config.train.jit_compile
    return model.causal or bool(tf.config.list_logical_devices("GPU"))


class TrainStep:
    """One step on one replica.

    The loss is the mean over all predicted tokens of the global batch, so it does not depend on the number of replicas.

    Args:
      model: A built language model.
      objective: Gives the negative log-likelihoods.
      optimizer: Updates the model's variables.
      config: The experiment.
      jit_compile: Whether XLA compiles `gradients` on each replica. A caller may compile the whole step instead.

    Attributes:
      seeds: The state of each dropout layer. A step sets it before a layer draws from it.
    """

    def __init__(self, model: keras.Model, objective, optimizer: AdamW, config: Config, jit_compile: bool = False):
        self.model, self.objective, self.optimizer, self._config = model, objective, optimizer, config
        self._variables = list(optimizer.variables.values())
        self.seeds = [layer.seed_generator.state for layer in dropouts(model)]
        self._gradients = tf.function(self.gradients, jit_compile=True) if jit_compile else self.gradients

    @tf.autograph.experimental.do_not_convert
    def __call__(self, batch: dict[str, tf.Tensor], step: tf.Tensor, rate: tf.Tensor | None = None) -> tf.Tensor:
        """Trains on this replica's share of the batch. Call it in replica context.

        Args:
          batch: The replica's windows.
          step: Steps done before, int64.
          rate: Learning rate, float32; None for the schedule's.

        Returns:
          The record of the step, float32 `[COLUMNS]`, the same on every replica.
        """
        context = tf.distribute.get_replica_context()
        self._seed_dropout(step, context)
        share = self._config.batch_size // context.num_replicas_in_sync  # several workers' input has no static shape
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
        """This replica's share of the mean gradient. With clip scope `replica`, its own mean is clipped first."""
        clip = self._config.optimizer.clip
        if clip is not None and clip.scope == "replica":
            own = [g / tf.maximum(tokens, 1) for g in gradients]
            own, _ = tf.clip_by_global_norm(own, clip.norm)
            return [g * (tokens / tf.maximum(all_tokens, 1)) for g in own]
        return [g / tf.maximum(all_tokens, 1) for g in gradients]

    def _accumulated(self, batch):
        """Sums of gradients, loss and tokens over the replica's batch, in `accumulate` micro-batches."""
        accumulate = self._config.train.accumulate
        if accumulate == 1:
            return self._gradients(batch)
        micro_batches = {name: tf.split(x, accumulate) for name, x in batch.items()}
        total = None
        for i in range(accumulate):
            sums = self._gradients({name: x[i] for name, x in micro_batches.items()})
            total = sums if total is None else tf.nest.map_structure(tf.add, total, sums)
        return total

    def gradients(self, batch: dict[str, tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Gradients of the summed loss, the summed loss, and the number of predicted tokens, float32."""
        with tf.GradientTape() as tape:
            loss, tokens = self.objective.loss(self.model, batch)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, self._variables)]
        return gradients, loss, tokens

    def _seed_dropout(self, step, context):
        """Makes dropout a function of seed, step and replica, so that a checkpoint needs no random state."""
        train, replica = self._config.train, tf.cast(context.replica_id_in_sync_group, tf.int64)
        draws = (tf.cast(step, tf.int64) * context.num_replicas_in_sync + replica) * train.accumulate
        for i, state in enumerate(self.seeds):
            first = (train.seed * 1_000_003 + i) % 2**31
            seed = tf.stack([tf.constant(first, tf.int64), draws % 2**31])
            state.value.assign(tf.cast(seed, state.value.dtype))


def dropouts(model: keras.Model) -> list[keras.layers.Dropout]:
    """The layers of a model that draw random numbers in training."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dropout) and layer.rate > 0]


class Trainer(orbit.AbstractTrainer):
    """Runs a training step on every replica, `num_steps` times without a return to Python.

    Args:
      step: The step.
      strategy: The strategy of the step's variables.
      global_step: Steps done.
      dataset: The distributed dataset, with each replica's share of the batch.

    Attributes:
      history: The records of the last loop, `[steps, COLUMNS]`.
      waiting: Share of the last loop's time in which the step waited for input.
      around: Makes the context that each loop runs in.
    """

    def __init__(self, *, step: TrainStep, strategy: tf.distribute.Strategy, global_step: tf.Variable, dataset):
        self.model, self.strategy, self.global_step = step.model, strategy, global_step
        self.history, self.waiting, self.around = None, 0.0, contextlib.nullcontext
        self.step, self._iterator = step, iter(dataset)
        self._loop = tf.function(self._steps)

    def train(self, num_steps: tf.Tensor) -> dict:
        """Runs `num_steps` steps. Returns the means of their records."""
        start = time.time()  # the same clock as tf.timestamp
        with self.around():
            history, waited, last = self._loop(self._iterator, num_steps)
            self.history = history.numpy()
        self.waiting = _waiting(waited.numpy(), start, last.numpy(), time.time(), len(self.history))
        return dict(zip(COLUMNS, self.history.mean(axis=0), strict=True))

    def _steps(self, iterator, num_steps):
        """The records, the seconds that steps waited for a batch, and the time when the last batch came."""
        history = tf.TensorArray(tf.float32, size=num_steps, element_shape=[len(COLUMNS)])
        waited, came = tf.zeros((), tf.float64), tf.zeros((), tf.float64)
        for i in tf.range(num_steps):
            batch, asked, came = _timed(iterator)
            waited += came - asked
            record = self.strategy.run(self.step, args=(batch, self.global_step.read_value()))
            history = history.write(i, self.strategy.experimental_local_results(record)[0])
            self.global_step.assign_add(1)
        return history.stack(), waited, came


def _timed(iterator):
    """The next batch, the time of asking for it and the time when it came, in seconds since 1970.

    Work on the batch waits until the time is taken; otherwise some of the work would be counted as waiting.
    """
    asked = tf.timestamp()
    with tf.control_dependencies([asked]):
        batch = next(iterator)
    with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
        came = tf.timestamp()
    with tf.control_dependencies([came]):
        return tf.nest.map_structure(_in_place, batch, expand_composites=True), asked, came


def _in_place(x):
    with tf.device(x.device):  # the replica's device
        return tf.identity(x)


def _waiting(waited, start, came, end, steps):
    """Share of a loop's time in which its steps waited for input and the devices had no other work.

    An accelerator works through a queue that the host fills ahead. The queue left when the last batch has come shows
    how far ahead the host was: one step if every step waited, all steps if none waited.
    """
    seconds = end - start
    idle = seconds - steps * (end - came) if tf.config.list_logical_devices("GPU") else seconds
    return float(max(0.0, min(waited, idle)) / seconds)
