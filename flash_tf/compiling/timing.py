"""Times training steps on made-up tokens, on this machine's device."""

import dataclasses
import itertools
import time

import tensorflow as tf

from flash_tf.compiling import values
from flash_tf.compiling.programs import Experiment
from flash_tf.training.update import COLUMNS

WARM_UP = 2  # steps after the one that compiles


@dataclasses.dataclass(frozen=True)
class Timed:
    """The time of some steps.

    Attributes:
      compile_s: Seconds of the first step, which compiles.
      milliseconds: Milliseconds of each timed step.
      loss: Loss of the last step.
    """

    compile_s: float
    milliseconds: list[float]
    loss: float


def time_steps(experiment: Experiment, steps: int) -> Timed:
    """Times whole steps with their update, after a few to warm up. Each is enqueued one ahead, as in training.

    XLA compiles the whole step, unless the config's `train.jit_compile` is false.
    """
    config = experiment.config
    shapes = {a.name: a.shape for a in experiment.batch(config.batch_size, config.data.sequence_length)}
    made_up = values.made_up(shapes, config.model["vocabulary_size"], config.train.seed)
    batch = {name: tf.constant(x) for name, x in made_up.items()}
    step = tf.function(experiment.train_step, jit_compile=config.train.jit_compile is not False, autograph=False)
    rate = tf.constant(config.optimizer.learning_rate, tf.float32)

    start = time.perf_counter()
    record = step(batch, tf.constant(0, tf.int64), rate).numpy()
    compile_s, ends, before = time.perf_counter() - start, [time.perf_counter()], None
    for done in range(1, WARM_UP + steps + 2):
        running = step(batch, tf.constant(done, tf.int64), rate)
        if before is not None:
            record = before.numpy()  # of the step before, while this one runs, as in training
            ends.append(time.perf_counter())
        before = running
    milliseconds = [1e3 * (b - a) for a, b in itertools.pairwise(ends)]
    return Timed(compile_s, milliseconds[WARM_UP:], float(record[COLUMNS.index("loss")]))
