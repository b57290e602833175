"""The training step, and the loop of steps inside one program."""

import contextlib
import functools
import time

import keras
import orbit
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.framework.config import is_op_determinism_enabled

from flash_tf.config import Config
from flash_tf.training import update, workers
from flash_tf.training.optimizer import AdamW
from flash_tf.training.update import COLUMNS, LOOP_SECONDS

TOGETHER = 16  # gradients whose squares one kernel adds
STACKED = 2**21  # the most tokens that a loop takes to the device at once
NAMES = 2**18  # more than a process counts before its first step; so far it counts in 0.03 s


@tf.autograph.experimental.do_not_convert
def round_up_names() -> None:
    """Called first in a function that TensorFlow traces, names its program alike in every process.

    By names XLA's cache finds programs. They hold a count of what the process made before, which is more where a run
    goes on from a checkpoint. The cache does not tell deterministic programs from others, so the names do.
    """
    while ops.uid() % NAMES:
        pass
    if is_op_determinism_enabled():
        ops.uid()


def uses_xla(config: Config, model: keras.Model) -> bool:
    """Whether XLA compiles forward and backward. "auto" chooses the faster way by our measurements.

    XLA is faster on a GPU. On a CPU causal models gain 8 to 16 % and masked models lose 3 to 16 %
    (`docs/performance.md`). A TPU's strategy compiles the whole replica function anyway.
    """
    if config.train.jit_compile != "auto":
        return config.train.jit_compile
    return model.causal or bool(tf.config.list_logical_devices("GPU"))


def compiles_parts(config: Config, model: keras.Model, strategy: tf.distribute.Strategy) -> bool:
    """Whether XLA compiles parts of a step: it compiles the whole loop of one device.

    A program in a program would have no functions that are compiled once for many calls: XLA takes them apart in what
    it compiles first, and not in the loops inside.
    """
    return uses_xla(config, model) and not isinstance(strategy, tf.distribute.OneDeviceStrategy)


def longest_loop(config: Config) -> int:
    """The most steps between two returns to Python, by `train.steps_per_loop` and by the input that a loop holds."""
    return max(1, min(config.train.steps_per_loop, STACKED // config.train.tokens_per_step))


class TrainStep:
    """One step on one replica.

    The loss is the mean over all predicted tokens of the global batch, so it does not depend on the number of replicas.

    Args:
      model: A built language model.
      objective: Gives the negative log-likelihoods.
      optimizer: Updates the model's variables.
      config: The experiment.
      jit_compile: Whether XLA compiles the sums of gradients, and the clipping; see `compiles_parts`.

    Attributes:
      seeds: The state of each dropout layer. A step sets it before a layer draws from it.
    """

    def __init__(self, model: keras.Model, objective, optimizer: AdamW, config: Config, jit_compile: bool = False):
        self.model, self.objective, self.optimizer, self.config = model, objective, optimizer, config
        self._variables = list(optimizer.variables.values())
        self.seeds = [layer.seed_generator.state for layer in update.dropouts(model)]
        xla = functools.partial(tf.function, jit_compile=True, autograph=False)
        self._compiled = xla if jit_compile else lambda function: function
        self._sums = self._compiled(self._accumulated)

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
        share = self.config.batch_size // context.num_replicas_in_sync  # several workers' input has no static shape
        batch = {name: tf.ensure_shape(x, [x.shape[0] or share, *x.shape[1:]]) for name, x in batch.items()}
        gradients, norm, loss, tokens = update.clipped_mean(
            self.config.optimizer.clip,
            *self._sums(batch),
            total=lambda values: context.all_reduce(tf.distribute.ReduceOp.SUM, values),
            norm_of=_norm,
            replicas=context.num_replicas_in_sync,
            names=list(self.optimizer.variables),
            compiled=self._compiled,
        )
        rate = self.optimizer.rate(step) if rate is None else rate
        self.optimizer.apply(gradients, step, rate)
        return tf.stack([loss / tf.maximum(tokens, 1), norm, rate, tokens])

    def gradients(self, batch: dict[str, tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Gradients of the summed loss, the summed loss, and the number of predicted tokens, float32."""
        with tf.GradientTape() as tape:
            loss, tokens = self.objective.loss(self.model, batch)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, self._variables)]
        return gradients, loss, tokens

    def _accumulated(self, batch):
        """The sums of `gradients` over the micro-batches."""
        zeros = [tf.zeros_like(variable) for variable in self._variables], tf.zeros([]), tf.zeros([])
        parts = self.config.train.accumulate
        return update.accumulated(lambda part, _: self.gradients(part), batch, parts, zeros, _one_after_the_other)

    def _seed_dropout(self, step, context):
        """Makes dropout a function of seed, step and replica."""
        train, replica = self.config.train, tf.cast(context.replica_id_in_sync_group, tf.int64)
        draws = (tf.cast(step, tf.int64) * context.num_replicas_in_sync + replica) * train.accumulate
        for i, state in enumerate(self.seeds):
            state.value.assign(tf.cast(update.dropout_seed(train.seed, i, draws), state.value.dtype))


def _norm(gradients):
    """The norm of all gradients together. A kernel adds several of one shape: one for each would take milliseconds."""
    alike = {}
    for gradient in gradients:
        alike.setdefault(tuple(gradient.shape), []).append(gradient)
    parts = [same[i : i + TOGETHER] for same in alike.values() for i in range(0, len(same), TOGETHER)]
    return tf.sqrt(tf.add_n([tf.reduce_sum(tf.add_n([tf.square(x) for x in part])) for part in parts]))


def _one_after_the_other(lower, upper, body, init):
    """`keras.ops.fori_loop`. Where XLA does not compile that loop, TensorFlow may run ten iterations at a time."""
    turn = lambda i, sums: (i + 1, body(i, sums))  # noqa: E731
    return tf.while_loop(lambda i, _: i < upper, turn, (tf.constant(lower), init), parallel_iterations=1)[1]


class Trainer(orbit.AbstractTrainer):
    """Runs a training step on every replica, `num_steps` times without a return to Python.

    One device runs the loop as one program, which XLA compiles: weights stay on the device, and the host has no work
    between two steps. Other strategies run programs for the gradients, the clipping and the update of each step, with
    the sum over replicas between them.

    Args:
      step: The step.
      strategy: The strategy of the step's variables.
      global_step: Steps done.
      dataset: The distributed dataset, with each replica's share of the batch.
      jit_compile: Whether XLA compiles the loop of one device.

    Attributes:
      history: The records of the last loop, `[steps, COLUMNS]`.
      waiting: Share of the last loop's time in which the step waited for input.
      reading: Whether the loop reads its batches, before its first step.
      around: Makes the context that each loop runs in.
    """

    def __init__(
        self,
        *,
        step: TrainStep,
        strategy: tf.distribute.Strategy,
        global_step: tf.Variable,
        dataset: tf.distribute.DistributedDataset,
        jit_compile: bool = False,
    ):
        self.model, self.strategy, self.global_step = step.model, strategy, global_step
        self.history, self.waiting, self.reading, self.around = None, 0.0, False, contextlib.nullcontext
        self.step, self._iterator, self._seconds = step, iter(dataset), None
        self._most = longest_loop(step.config)
        if isinstance(strategy, tf.distribute.OneDeviceStrategy):
            self._read = tf.function(self._stacked)
            self._run = tf.function(self._program, jit_compile=jit_compile or None, autograph=False)
        else:
            self._read = lambda iterator, num_steps: (iterator, tf.zeros((), tf.float64))
            self._run = tf.function(self._steps)

    @property
    def steps_per_loop(self) -> int:
        """Steps of the next loop: as many as LOOP_SECONDS allow, and one while the time of a step is unknown."""
        return 1 if self._seconds is None else max(1, min(self._most, int(LOOP_SECONDS / self._seconds)))

    @property
    def several(self) -> bool:
        """Whether the run has several processes."""
        return workers.several(self.strategy)

    def largest(self, value: float) -> float:
        """The largest of all processes' values; see `workers.largest`."""
        return workers.largest(self.strategy, value)

    def train(self, num_steps: tf.Tensor) -> dict:
        """Runs `num_steps` steps. Returns the means of their records."""
        if self._seconds is None:
            self._compile()
        start, first = time.perf_counter(), self.global_step.read_value()
        with self.around():
            self.reading = True
            batches, waited = self._read(self._iterator, num_steps)
            self.reading = False
            history, waited = self._run(batches, first, num_steps, waited)
            self.history = history.numpy()[: int(num_steps)]
        self.global_step.assign_add(len(self.history))
        seconds = time.perf_counter() - start
        self.waiting = float(waited) / seconds
        self._seconds = self.largest(seconds / len(self.history))  # so all workers' loops have one length
        return dict(zip(COLUMNS, self.history.mean(axis=0), strict=True))

    def _compile(self):
        """Compiles one device's program by a loop of no steps, while the text of its first batches is tokenized."""
        if isinstance(self.strategy, tf.distribute.OneDeviceStrategy):
            spec = self._iterator.element_spec
            batches = {name: tf.zeros([self._most, *x.shape], x.dtype) for name, x in spec.items()}
            self._run(batches, self.global_step.read_value(), tf.constant(0), tf.zeros((), tf.float64))

    def _stacked(self, iterator, num_steps):
        """The next batches on a new first axis, which zeros fill, and the seconds that they took to come."""
        asked = self._now()
        with tf.device("CPU:0"), tf.control_dependencies([asked]):
            spec = iterator.element_spec
            arrays = {name: tf.TensorArray(x.dtype, self._most, element_shape=x.shape) for name, x in spec.items()}
            for i in tf.range(num_steps):
                batch = next(iterator)
                arrays = {name: array.write(i, batch[name]) for name, array in arrays.items()}
            batches = {name: array.stack() for name, array in arrays.items()}
            with tf.control_dependencies(list(batches.values())):
                return batches, self._now() - asked

    def _program(self, batches, first, num_steps, waited):
        """The records of steps on batches from `_stacked`, with zeros after them."""
        round_up_names()

        def loop(batches, first, num_steps):
            def body(i, history):
                record = self.step({name: x[i] for name, x in batches.items()}, first + tf.cast(i, tf.int64))
                return i + 1, history.write(i, record)

            history = tf.TensorArray(tf.float32, self._most, element_shape=[len(COLUMNS)])
            return tf.while_loop(lambda i, _: i < num_steps, body, (0, history))[1].stack()

        return self.strategy.run(loop, args=(batches, first, num_steps)), waited

    def _steps(self, iterator, first, num_steps, waited):
        """The records of steps on the next batches, and the seconds that they waited for them."""
        round_up_names()
        history = tf.TensorArray(tf.float32, size=num_steps, element_shape=[len(COLUMNS)])
        for i in tf.range(num_steps):
            batch, seconds = self._timed(iterator)
            record = self.strategy.run(self.step, args=(batch, first + tf.cast(i, tf.int64)))
            history = history.write(i, self.strategy.experimental_local_results(record)[0])
            waited += seconds
        return history.stack(), waited

    def _timed(self, iterator):
        """The next batch, and the seconds that it took to come.

        Work on the batch waits until the time is taken; otherwise some of the work would be counted as waiting.
        """
        asked = self._now()
        with tf.control_dependencies([asked]):
            batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            came = self._now()
        with tf.control_dependencies([came]):
            return tf.nest.map_structure(_in_place, batch, expand_composites=True), came - asked

    def _now(self):
        """The time. TensorFlow has none among deterministic operators, so that no waiting is seen then."""
        return tf.zeros((), tf.float64) if is_op_determinism_enabled() else tf.timestamp()


def _in_place(x):
    with tf.device(x.device):  # the replica's device
        return tf.identity(x)
