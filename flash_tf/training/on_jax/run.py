"""A run on JAX: its state on a mesh, restored from a checkpoint of either trainer."""

import dataclasses
import math
import random

import jax
import keras

from flash_tf import model_stats
from flash_tf.config import Config
from flash_tf.data.prepared import PreparedWindows
from flash_tf.training import modelling
from flash_tf.training.on_jax.checkpoints import Place, ShardedCheckpoints
from flash_tf.training.on_jax.mesh import DATA, ROWS, make_mesh
from flash_tf.training.on_jax.step import State, Step
from flash_tf.training.on_jax.trainer import Trainer
from flash_tf.training.progress import Progress
from flash_tf.training.run import Run, begin_from, check_batch, enter, open_stream, resume
from flash_tf.training.tasks import objective_of


@dataclasses.dataclass(kw_only=True)
class JaxRun(Run):
    """A run with arrays of JAX.

    Attributes:
      program: The step on the run's mesh.
      state: The state before the first step of this process. A trainer takes it over.
      trainer: The trainer, once there is one.
    """

    program: Step
    state: State | None
    trainer: Trainer | None = None

    @property
    def values(self) -> State:
        return self.state if self.trainer is None else self.trainer.state

    def write(self, notes):
        self.checkpoints.save(self.values, notes)


def open_run(config: Config, model_dir: str, progress: Progress, extends: bool = False) -> JaxRun:
    """Makes a run's state on its mesh, or restores the newest checkpoint to it.

    Nobody else may write the model directory meanwhile; see `Owner`.

    Raises:
      ValueError: The config is not valid, or the model directory holds another run.
    """
    mesh, chief = make_mesh(config.strategy), jax.process_index() == 0
    check_batch(config, math.prod(mesh.shape[axis] for axis in ROWS), "devices")
    checkpoints = ShardedCheckpoints(f"{model_dir}/checkpoints", progress.line, chief)
    start, tokenizer = enter(config, model_dir, checkpoints, chief=chief, extends=extends, report=progress.line)
    random.seed(config.train.seed)  # from which Keras takes the seeds of initializers
    with model_stats.without_weights():
        model = modelling.make_model(config)
    objective = objective_of(config)(config, tokenizer)
    run = JaxRun(
        config=config,
        model_dir=model_dir,
        progress=progress,
        tokenizer=tokenizer,
        objective=objective,
        model=model,
        step=keras.Variable(0, dtype="int32", trainable=False, name="step"),
        chief=chief,
        checkpoints=checkpoints,
        replicas=mesh.shape[DATA],
        program=Step(model, objective, config, mesh),
        state=None,
    )
    _restore(run, start)
    return run


def _restore(run, start):
    """Gives a run its state: from its newest checkpoint, from another model, or new."""
    places = {name: Place(x.shape, x.sharding) for name, x in run.program.state.items()}
    resume(run, places)
    if run.saved is None:
        for name, x in run.program.first_state().items():
            places[name].value = x
    if start is not None:
        with keras.StatelessScope(initialize_variables=False) as scope:
            begin_from(run, start)
        for variable in run.model.weights:
            if (value := scope.get_current_value(variable)) is not None:
                places[variable.path].assign(value)
    run.state = {name: place.value for name, place in places.items()}


def make_trainer(run: JaxRun) -> Trainer:
    """The trainer of a run, which reads its training windows from the run's position."""
    stream = open_stream(run, PreparedWindows)
    run.trainer = Trainer(step=run.program, state=run.state, done=run.step, read=stream.batch)
    run.state = None  # the first step takes its memory
    run.trainer.stop_data = stream.stop
    return run.trainer
