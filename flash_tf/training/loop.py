"""Training and evaluation of one config, in reading order."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator

import keras
import orbit
import tensorflow as tf

from flash_tf.config import Config
from flash_tf.data.stream import EvaluationBatches, WindowStream
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training import actions, build, modelling, profiled, run_directory
from flash_tf.training.checkpoints import Checkpoints
from flash_tf.training.evaluator import Evaluator, per_replica
from flash_tf.training.objective import OBJECTIVES
from flash_tf.training.optimizer import AdamW
from flash_tf.training.progress import Progress, evaluation_parts, peak_flops
from flash_tf.training.restore import restore
from flash_tf.training.step import TrainStep, uses_xla
from flash_tf.training.strategy import device_name, is_chief, make_strategy
from flash_tf.training.trainer import Trainer

EVALUATED_AT_ONCE = 2**14  # tokens, by `evaluate` on one device, which need not hold the step of many


def train(config: Config, model_dir: str, progress: Progress) -> dict:
    """Trains, or goes on where the run in `model_dir` was; returns the last evaluation.

    Raises:
      ValueError: Bad input, or a diverged run (`actions.DivergedError`); nothing is overwritten.
      actions.Interrupted: After SIGTERM or SIGINT; the state is saved.
    """
    run, stream, trainer = prepare(config, model_dir, progress)
    evaluator = make_evaluator(run, run.config.batch_size // run.config.train.accumulate)
    report = actions.Report(
        trainer,
        run.step,
        run.records(run_directory.METRICS, int(run.step.numpy())),
        progress,
        config=run.config.train,
        flops_per_step=modelling.training_flops_per_step(run.config, run.model),
        peak=peak_flops(device_name(), run.config.train.precision, run.strategy.num_replicas_in_sync),
    )
    evaluations = run.records(run_directory.EVALUATIONS, run.evaluated)
    folder = f"{model_dir}/profile" if run.chief else None
    profile = actions.Profile(run.config.profile, trainer, run.step, folder, functools.partial(_finish, run, report))

    orbit_in_log = contextlib.redirect_stdout(sys.stderr)  # which the command line points at its log
    with actions.Signals(run.save, progress) as signals, profile, orbit_in_log:
        controller = orbit.Controller(
            global_step=run.step,
            trainer=trainer,
            evaluator=evaluator,
            strategy=run.strategy,
            steps_per_loop=profile.steps_per_loop(run.config.train.steps_per_loop),
            summary_dir=f"{model_dir}/summaries" if run.chief else None,
            eval_summary_dir=f"{model_dir}/summaries/validation" if run.chief else None,
            train_actions=[
                actions.CheckFinite(trainer, run.step, run.checkpoints),
                report,
                actions.Save(run.save, run.step, run.config.train.checkpoint_every),
                profile,
                signals,
            ],
        )
        report.begin()
        for until in _evaluation_steps(run):
            report.restart_clock()
            with errors_of(stream):
                controller.train(steps=until, checkpoint_at_completion=False)
            run.evaluation = {"step": until, **controller.evaluate()}
            progress.status(*evaluation_parts(run.evaluation), keep=True)
            evaluations.append([run.evaluation])
            run.save()
    if not run.evaluation:
        progress.line(f"the run has all of its {run.steps:,} steps: evaluating the last once more")
    return run.evaluation or {"step": run.steps, **evaluator.evaluate(None)}


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run's parts, restored to where it was.

    Attributes:
      saved: Step of the checkpoint that this process wrote or restored last.
      evaluated: Evaluations up to this step are done.
      evaluation: The last one, with its `step`; empty before the first.
    """

    config: Config
    model_dir: str
    progress: Progress
    strategy: tf.distribute.Strategy
    tokenizer: Tokenizer
    objective: object
    model: keras.Model
    checkpoints: Checkpoints
    optimizer: AdamW | None = None
    step: tf.Variable | None = None
    saved: int | None = None
    evaluated: int = 0
    evaluation: dict = dataclasses.field(default_factory=dict)

    @property
    def chief(self) -> bool:
        return is_chief(self.strategy)

    @property
    def steps(self) -> int:
        return self.config.train.steps

    @property
    def position(self) -> int:
        """Windows read so far, the place in the stream of data."""
        return int(self.step.numpy()) * self.config.batch_size

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """What a checkpoint holds. All that is random follows from the seed, the step and the position."""
        return {**self.weights, **self.optimizer.state()}

    @property
    def weights(self) -> dict[str, tf.Variable]:
        return {v.path: v.value for v in self.model.weights}

    def save(self) -> None:
        """Saves a checkpoint of this step, with the validation loss if it was evaluated here."""
        if not self.chief:
            return
        step = int(self.step.numpy())
        loss = {"loss": self.evaluation["loss"]} if self.evaluation.get("step") == step else {}
        if step != self.saved:
            notes = {"step": step, "position": self.position, "seed": self.config.train.seed, **loss}
            self.checkpoints.save(self.variables, notes)
            self.saved = step
        elif loss:
            self.checkpoints.note(step, loss)
        self.checkpoints.prune(self.config.train.keep)

    def records(self, name: str, step: int) -> run_directory.Records:
        """A file of records kept up to a step, which only the chief writes."""
        return run_directory.Records(f"{self.model_dir}/{name}" if self.chief else None, step)


def prepare(config: Config, model_dir: str, progress: Progress) -> tuple[Run, WindowStream, Trainer]:
    """A run, its data and its steps, before the first of them."""
    run = _prepare(modelling.with_masking(config), model_dir, progress)
    stream = _open_stream(run)
    return run, stream, _make_trainer(run, stream)


def _prepare(config, model_dir, progress):
    """Everything that a step needs, under the strategy's scope, restored from the newest checkpoint."""
    strategy = make_strategy(config.strategy)
    replicas, accumulate = strategy.num_replicas_in_sync, config.train.accumulate
    if config.batch_size % (replicas * accumulate):
        raise ValueError(
            f"{config.batch_size} sequences a step (train.tokens_per_step / data.sequence_length) do not divide "
            f"by {replicas} replicas x train.accumulate {accumulate}"
        )
    if is_chief(strategy):
        run_directory.claim(model_dir, config)
    tokenizer = build.make_tokenizer(config, model_dir, chief=is_chief(strategy), report=progress.line)
    keras.utils.set_random_seed(config.train.seed)
    with strategy.scope():
        model = modelling.make_model(config)
        optimizer = AdamW(config.optimizer, config.train.steps, {v.path: v.value for v in model.trainable_variables})
        step = orbit.utils.create_global_step()
    run = Run(
        config=config,
        model_dir=model_dir,
        progress=progress,
        strategy=strategy,
        tokenizer=tokenizer,
        objective=OBJECTIVES[config.model["type"]](config, tokenizer),
        model=model,
        checkpoints=Checkpoints(f"{model_dir}/checkpoints", progress.line),
        optimizer=optimizer,
        step=step,
    )
    if (notes := run.checkpoints.restore_newest(run.variables)) is not None:
        step.assign(notes["step"])
        run.saved = notes["step"]
        run.evaluated = notes["step"] - ("loss" not in notes)
        progress.line(f"going on from step {notes['step']:,}")
    return run


def _open_stream(run):
    config = run.config
    return WindowStream(
        build.make_cache(config, run.model_dir, run.tokenizer, "train", run.progress.tokenised),
        sequence_length=config.data.sequence_length,
        overlap=run.objective.overlap,
        packing=config.data.packing,
        align=run.model.align,
        seed=config.train.seed,
        limit=config.train.steps * config.batch_size,
    )


def _make_trainer(run, stream):
    config, position = run.config, run.position

    def pipeline(context):
        rows = config.batch_size // context.num_input_pipelines
        dataset = stream.dataset(position, config.batch_size, context.num_input_pipelines, context.input_pipeline_id)
        return per_replica(dataset, rows, context)

    return Trainer(
        step=TrainStep(run.model, run.objective, run.optimizer, config, jit_compile=uses_xla(config, run.model)),
        strategy=run.strategy,
        global_step=run.step,
        dataset=run.strategy.distribute_datasets_from_function(pipeline),
    )


def make_evaluator(run: Run, batch_size: int) -> Evaluator:
    """The evaluator of a run's validation split. Says at once if there is none; tokenises it when first asked."""
    config = run.config
    batches = functools.partial(
        EvaluationBatches,
        build.make_cache(config, run.model_dir, run.tokenizer, "validation", run.progress.tokenised),
        sequence_length=config.data.sequence_length,
        overlap=run.objective.overlap,
        packing=config.data.packing,
        align=run.model.align,
        batch_size=batch_size,
        windows=config.evaluation.windows,
    )
    counts_words = build.SOURCES.build(config.data.source).counts_words
    return Evaluator(
        model=run.model,
        objective=run.objective,
        strategy=run.strategy,
        batches=batches,
        counts_words=counts_words,
        report=run.progress.evaluated,
    )


def evaluate(model_dir: str, progress: Progress, checkpoint: str = "best") -> dict:
    """Evaluates a checkpoint of a model directory, "best" or "newest"; returns `summarize`'s result and the `step`."""
    trained = restore(model_dir, progress.line, checkpoint)
    config = trained.config
    run = Run(
        config=config,
        model_dir=model_dir,
        progress=progress,
        strategy=tf.distribute.get_strategy(),
        tokenizer=trained.tokenizer,
        objective=OBJECTIVES[config.model["type"]](config, trained.tokenizer),
        model=trained.model,
        checkpoints=Checkpoints(f"{model_dir}/checkpoints", progress.line),
    )
    rows = max(1, EVALUATED_AT_ONCE // config.data.sequence_length)
    return {"step": trained.step, **make_evaluator(run, min(rows, config.batch_size)).evaluate(None)}


def _evaluation_steps(run) -> Iterator[int]:
    """The steps at which to evaluate: every multiple of `evaluation.every`, and the last."""
    every, step = run.config.evaluation.every or run.steps, run.evaluated
    while step < run.steps:
        step = min(step - step % every + every, run.steps)
        yield step


def _finish(run, report, capture):
    profiled.finish(run.config, run.model, run.strategy, capture, run.progress)
    report.restart_clock()


@contextlib.contextmanager
def errors_of(stream: WindowStream) -> Iterator[None]:
    """Raises what went wrong in reading data as it was, not as tf.data reports it."""
    try:
        yield
    except tf.errors.OpError as error:
        raise stream.failure or error from None
