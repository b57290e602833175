"""A run under `tf.distribute`: variables of TensorFlow, and the trainer that updates them."""

import contextlib
import dataclasses
from collections.abc import Iterator
from operator import methodcaller

import keras
import numpy as np
import orbit
import tensorflow as tf

from flash_tf import presets
from flash_tf.config import Config
from flash_tf.data.prepared_input import PreparedStream
from flash_tf.data.sources import SOURCES
from flash_tf.data.sources.prepared import PreparedText
from flash_tf.data.stream import WindowStream
from flash_tf.training import modelling
from flash_tf.training.checkpoints import Checkpoints
from flash_tf.training.evaluator import per_replica
from flash_tf.training.optimizer import AdamW
from flash_tf.training.progress import Progress
from flash_tf.training.run import Run, begin_from, check_batch, enter, resume
from flash_tf.training.strategy import hosts, is_chief
from flash_tf.training.tasks import objective_of
from flash_tf.training.trainer import Trainer, TrainStep, compiles_parts, uses_xla


@dataclasses.dataclass(kw_only=True)
class TensorFlowRun(Run):
    """A run with variables of TensorFlow.

    Attributes:
      strategy: The strategy of the variables.
      optimizer: The optimizer of the model's variables.
    """

    strategy: tf.distribute.Strategy
    optimizer: AdamW

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The variables of a checkpoint."""
        return {**self.weights, **self.optimizer.state()}

    @property
    def weights(self) -> dict[str, tf.Variable]:
        return {v.path: v.value for v in self.model.weights}

    @property
    def values(self) -> dict[str, np.ndarray]:
        return {name: v.numpy() for name, v in self.variables.items()}

    def write(self, notes):
        if self.chief:
            self.checkpoints.save(self.variables, notes)


def open_run(
    config: Config, model_dir: str, strategy: tf.distribute.Strategy, progress: Progress, extends: bool = False
) -> TensorFlowRun:
    """Makes a run's model and optimizer under the strategy's scope, and restores the newest checkpoint.

    Nobody else may write the model directory meanwhile; see `Owner`.

    Raises:
      ValueError: The config is not valid, or the model directory holds another run.
    """
    config = modelling.with_masking(config)
    check_batch(config, strategy.num_replicas_in_sync, "replicas")
    check_hosts(config, strategy)
    checkpoints = Checkpoints(f"{model_dir}/checkpoints", progress.line)
    chief = is_chief(strategy)
    start, tokenizer = enter(config, model_dir, checkpoints, chief=chief, extends=extends, report=progress.line)
    keras.utils.set_random_seed(config.train.seed)
    build = presets.build_unfilled if checkpoints.steps() else methodcaller("build")
    with strategy.scope():
        model = modelling.make_model(config, build)
        trained = {v.path: v.value for v in model.trainable_variables}
        parts = compiles_parts(config, model, strategy)
        optimizer = AdamW(config.optimizer, config.train.steps, trained, jit_compile=parts)
        step = orbit.utils.create_global_step()
    run = TensorFlowRun(
        config=config,
        model_dir=model_dir,
        progress=progress,
        strategy=strategy,
        tokenizer=tokenizer,
        objective=objective_of(config)(config, tokenizer),
        model=model,
        optimizer=optimizer,
        step=step,
        chief=chief,
        checkpoints=checkpoints,
        replicas=strategy.num_replicas_in_sync,
    )
    if start is not None:
        begin_from(run, start)
    resume(run, run.variables)
    return run


def check_hosts(config: Config, strategy: tf.distribute.Strategy) -> None:
    """Raises a ValueError where other hosts cannot read the text, because this process tokenizes it."""
    if (count := hosts(strategy)) > 1 and not isinstance(SOURCES.build(config.data.source), PreparedText):
        raise ValueError(
            f"strategy.tpu {config.strategy.tpu!r} has {count} hosts, which read prepared text alone: "
            "`flash-tf prepare` writes it, and data.source {type: prepared, path: gs://…} reads it"
        )


def make_trainer(run: Run, stream: WindowStream | PreparedStream) -> Trainer:
    """The trainer of a run, which reads the stream from the run's position."""
    config, position = run.config, run.position
    # One device takes the batches of a whole loop at once; several get each batch ahead of its step.
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    options = options if isinstance(run.strategy, tf.distribute.OneDeviceStrategy) else None

    def pipeline(context):
        share = config.batch_size // context.num_input_pipelines
        dataset = stream.dataset(position, config.batch_size, context.num_input_pipelines, context.input_pipeline_id)
        return per_replica(dataset, share, context)

    parts = compiles_parts(config, run.model, run.strategy)
    return Trainer(
        step=TrainStep(run.model, run.objective, run.optimizer, config, jit_compile=parts),
        jit_compile=uses_xla(config, run.model),
        strategy=run.strategy,
        global_step=run.step,
        dataset=run.strategy.distribute_datasets_from_function(pipeline, options),
    )


@contextlib.contextmanager
def errors_of(stream: WindowStream | PreparedStream) -> Iterator[None]:
    """Raises the original error of reading data in place of tf.data's."""
    try:
        yield
    except tf.errors.OpError as error:
        raise stream.failure or error from None
