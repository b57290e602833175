"""Training and evaluation of one config, in reading order."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping

import keras
import orbit
import tensorflow as tf

from flash_tf.config import Config
from flash_tf.data.prepared_input import PreparedBatches, PreparedStream
from flash_tf.data.sources import SOURCES
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.profiling import latency
from flash_tf.training import actions, given, maintenance, mirror, modelling, preflight, profile, run_directory, workers
from flash_tf.training.evaluator import Evaluator, TaskEvaluator
from flash_tf.training.inputs import evaluated_rows, evaluation_batches
from flash_tf.training.owner import Owner
from flash_tf.training.progress import Progress, evaluation_parts, peak_flops
from flash_tf.training.restore import restore
from flash_tf.training.run import evaluation_steps, last_evaluation, open_stream
from flash_tf.training.strategy import device_name, is_chief, make_strategy
from flash_tf.training.tasks import TaskObjective, objective_of
from flash_tf.training.tensorflow_run import errors_of, make_trainer, open_run
from flash_tf.training.trainer import uses_xla


def train(
    config: Config,
    model_dir: str,
    progress: Progress,
    extends: bool = False,
    begins: Callable[[], None] = lambda: None,
    dataset: Mapping[str, Iterable[dict]] | None = None,
    callback: mirror.Mirror | None = None,
) -> dict:
    """Trains a model, or continues the run in `model_dir`. Returns the last evaluation.

    Args:
      config: The experiment.
      model_dir: The folder of the run, local or gs://.
      progress: Shows the state of the run.
      extends: Whether the config may have more steps than the run; see `extend.extended`.
      begins: Called once the folder is the run's.
      dataset: Examples of a task in place of `data.source`; see `given.with_examples`.
      callback: Called as `callback(kind, records)` with copies of the records of each loop of steps, kind "train", and
        of each evaluation, "validation", as metrics.jsonl and evaluations.jsonl have them; of several processes in the
        first. What it raises ends the training.

    Raises:
      ValueError: The input is not valid, or the run diverged (`run.DivergedError`). Nothing is overwritten.
      actions.Interrupted: SIGTERM, SIGINT or SIGHUP came. The state is saved.
    """
    if dataset is not None:
        with given.with_examples(config, model_dir, dataset, progress.line) as (config, owner):
            return _owned(config, model_dir, progress, extends, begins, callback, owner)
    return _owned(config, model_dir, progress, extends, begins, callback)


def _owned(config, model_dir, progress, extends, begins, callback, owner=None):
    """Trains. Without an owner, the chief is one once it is known."""
    config = preflight.check(config, model_dir)
    if config.train.deterministic:
        _take_one_order()
    strategy = make_strategy(config.strategy, progress.line)
    held = contextlib.nullcontext(owner) if owner else Owner(model_dir if is_chief(strategy) else None, progress.line)
    with workers.together(strategy), held as owner:
        run = open_run(config, model_dir, strategy, progress, extends)
        on_tpu = config.strategy.type == "tpu"
        with run.begun(), mirror.mirrored(config, model_dir, run.chief, progress.line, callback) as copy:
            begins()
            with maintenance.watched(progress.line) if on_tpu else contextlib.nullcontext():
                return _train(run, owner, copy)


def _take_one_order():
    """Lets every sum have one order. TensorFlow and XLA read it when they first compile."""
    tf.config.experimental.enable_op_determinism()
    # XLA then tries no tiles for its own products and takes small ones. cuBLAS chooses well without a trial.
    given = os.environ.get("XLA_FLAGS", "")  # noqa: TID251  the only way to XLA's options from TensorFlow
    os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_triton_gemm=false {given}"  # noqa: TID251


def _train(run, owner, copy):
    config, model_dir, progress, stream = run.config, run.model_dir, run.progress, open_stream(run, PreparedStream)
    if run.chief:
        run.checkpoints.set_aside(after=int(run.step.numpy()))
    trainer = make_trainer(run, stream)
    evaluator = make_evaluator(
        config,
        model_dir,
        run.model,
        run.tokenizer,
        strategy=run.strategy,
        batch_size=evaluated_rows(config, run.strategy.num_replicas_in_sync),
        progress=progress,
    )
    metrics = actions.Metrics(
        trainer,
        run.step,
        run.records(run_directory.METRICS, int(run.step.numpy())),
        progress,
        config=config.train,
        flops_per_step=modelling.training_flops_per_step(config, run.model),
        peak=peak_flops(device_name(), config.train.precision, run.strategy.num_replicas_in_sync),
        mirror=copy,
    )
    evaluations = run.records(run_directory.EVALUATIONS, run.evaluated)
    folder = f"{model_dir}/profile" if run.chief else None
    profiler = actions.Profiler(
        config.profile, trainer, run.step, folder, functools.partial(_finish_profile, run, metrics)
    )

    save = actions.Save(run.save, run.step, config.train.checkpoint_every)
    orbit_in_log = contextlib.redirect_stdout(sys.stderr)  # the command line points it at its log
    with actions.Signals(run.save, stream.stop, trainer, progress) as signals, profiler, orbit_in_log:
        controller = orbit.Controller(
            global_step=run.step,
            trainer=trainer,
            evaluator=evaluator,
            strategy=run.strategy,
            steps_per_loop=lambda done: min(
                profiler.steps_per_loop(done, trainer.steps_per_loop), save.steps_until(done)
            ),
            summary_dir=f"{model_dir}/summaries" if run.chief else None,
            eval_summary_dir=f"{model_dir}/summaries/validation" if run.chief else None,
            train_actions=[
                lambda output: owner.check(),
                actions.CheckFinite(trainer, run.step, run.diverged),
                metrics,
                save,
                profiler,
                signals,
            ],
        )
        metrics.begin()
        for until in evaluation_steps(run):
            metrics.restart_clock()
            with errors_of(stream):
                controller.train(steps=until, checkpoint_at_completion=False)
                with signals.evaluation():
                    run.take({"step": until, **controller.evaluate()})
            progress.status(*evaluation_parts(run.evaluation), keep=True)
            evaluations.append([run.evaluation])
            copy("validation", [run.evaluation])
            run.save()
        signals(None)  # one may have come since the last step
    return last_evaluation(run, lambda: evaluator.evaluate(None))


def evaluate(model_dir: str, progress: Progress, checkpoint: str | int = "best", overrides: Iterable[str] = ()) -> dict:
    """Evaluates the model of a run on its validation split.

    Args:
      model_dir: The folder of the run.
      progress: Shows the state of the evaluation.
      checkpoint: "best", "newest" or a step; see `restore`.
      overrides: Options in place of the run's; see `restore`.

    Returns:
      The `step` of the checkpoint, and the result of `evaluator.summarize`, or of `TaskObjective.summarize`.
    """
    trained = restore(model_dir, progress.line, checkpoint, overrides)
    config = trained.config
    evaluator = make_evaluator(
        config,
        model_dir,
        trained.model,
        trained.tokenizer,
        strategy=tf.distribute.get_strategy(),
        batch_size=evaluated_rows(config),
        progress=progress,
    )
    return {"step": trained.step, **evaluator.evaluate(None)}


def make_evaluator(
    config: Config,
    model_dir: str,
    model: keras.Model,
    tokenizer: Tokenizer,
    *,
    strategy: tf.distribute.Strategy,
    batch_size: int,
    progress: Progress,
) -> Evaluator:
    """The evaluator of a config's validation split. It tokenizes the split at the first evaluation.

    Raises:
      ValueError: The source has no validation split.
    """
    objective = objective_of(config)(config, tokenizer)
    evaluator = TaskEvaluator if isinstance(objective, TaskObjective) else Evaluator
    return evaluator(
        model=model,
        objective=objective,
        strategy=strategy,
        batches=evaluation_batches(
            config, model_dir, model, tokenizer, batch_size=batch_size, progress=progress, of_prepared=PreparedBatches
        ),
        counts_words=SOURCES.build(config.data.source).counts_words,
        on_progress=progress.evaluated,
        jit_compile=uses_xla(config, model),
    )


def _finish_profile(run, metrics, capture):
    """Writes the figures of a capture during training, and shows them in a line."""
    result = profile.finish(capture, profile.training_work(run))
    first, last = (result["steps"][i]["step"] for i in (0, -1))
    run.progress.line(f"profile of steps {first:,} to {last:,}: {latency.headline(result)}; in {capture.folder}")
    metrics.restart_clock()
