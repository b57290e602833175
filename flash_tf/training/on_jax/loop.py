"""Training of one config on JAX, in reading order."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import keras

from flash_tf.config import Config
from flash_tf.data.prepared import PreparedEvaluation
from flash_tf.data.sources import SOURCES
from flash_tf.training import actions, given, mirror, modelling, preflight, run_directory
from flash_tf.training.inputs import evaluated_rows, evaluation_batches
from flash_tf.training.on_jax import processes
from flash_tf.training.on_jax.mesh import ROWS
from flash_tf.training.on_jax.run import make_trainer, open_run
from flash_tf.training.on_jax.summaries import summaries
from flash_tf.training.on_jax.trainer import Evaluator
from flash_tf.training.owner import Owner
from flash_tf.training.progress import Progress, evaluation_parts, peak_flops
from flash_tf.training.run import evaluation_steps, last_evaluation


def train(
    config: Config,
    model_dir: str,
    progress: Progress,
    extends: bool = False,
    begins: Callable[[], None] = lambda: None,
    dataset: Mapping[str, Iterable[dict]] | None = None,
    callback: mirror.Mirror | None = None,
) -> dict:
    """As `flash_tf.training.loop.train`, with the same files and lines, and checkpoints that either can go on from."""
    if dataset is not None:
        with given.with_examples(config, model_dir, dataset, progress.line) as (config, owner):
            return _owned(config, model_dir, progress, extends, begins, callback, owner)
    return _owned(config, model_dir, progress, extends, begins, callback)


def _owned(config, model_dir, progress, extends, begins, callback, owner=None):
    """Trains. Without an owner, the first process is one once it is known."""
    config = preflight.check(config, model_dir)
    if config.train.deterministic:
        # Of several equal gradients of cuDNN's attention, XLA finds the deterministic kernel for the first alone.
        keras.config.disable_flash_attention()
    with processes.together(config.strategy, progress.line), _owner(model_dir, progress, owner) as owner:
        run = open_run(config, model_dir, progress, extends)
        with (
            run.begun(),
            run.checkpoints,
            mirror.mirrored(config, model_dir, run.chief, progress.line, callback) as copy,
            summaries(model_dir, run.chief) as write,
        ):
            begins()
            return _train(run, owner, copy, write)


def _owner(model_dir, progress, owner):
    if owner is not None:
        return contextlib.nullcontext(owner)
    return Owner(model_dir if jax.process_index() == 0 else None, progress.line)


def _train(run, owner, copy, write):
    config, progress, trainer = run.config, run.progress, make_trainer(run)
    if run.chief:
        run.checkpoints.set_aside(after=int(run.step.numpy()))
    evaluator = _evaluator(run)
    metrics = actions.Metrics(
        trainer,
        run.step,
        run.records(run_directory.METRICS, int(run.step.numpy())),
        progress,
        config=config.train,
        flops_per_step=modelling.training_flops_per_step(config, run.model),
        peak=peak_flops(jax.devices()[0].device_kind, config.train.precision, jax.device_count()),
        mirror=copy,
    )
    evaluations = run.records(run_directory.EVALUATIONS, run.evaluated)
    save = actions.Save(run.save, run.step, config.train.checkpoint_every)
    with actions.Signals(run.save, trainer.stop_data, trainer, progress) as signals:
        after_loop = [
            lambda output: owner.check(),
            actions.CheckFinite(trainer, run.step, run.diverged),
            metrics,
            lambda output: write("", int(run.step.numpy()), trainer.means),
            save,
            signals,
        ]
        metrics.begin()
        for until in evaluation_steps(run):
            metrics.restart_clock()
            while (done := int(run.step.numpy())) < until:
                trainer.train(min(until - done, trainer.steps_per_loop, save.steps_until(done)))
                for action in after_loop:
                    action(None)
            with signals.evaluation():
                run.take({"step": until, **evaluator.evaluate()})
            progress.status(*evaluation_parts(run.evaluation), keep=True)
            evaluations.append([run.evaluation])
            copy("validation", [run.evaluation])
            write("validation", until, {name: value for name, value in run.evaluation.items() if name != "step"})
            run.save()
        signals(None)  # one may have come since the last step
    return last_evaluation(run, evaluator.evaluate)


def _evaluator(run):
    config = run.config
    batches = evaluation_batches(
        config,
        run.model_dir,
        run.model,
        run.tokenizer,
        batch_size=evaluated_rows(config, math.prod(run.program.mesh.shape[axis] for axis in ROWS)),
        progress=run.progress,
        of_prepared=PreparedEvaluation,
    )
    counts_words = SOURCES.build(config.data.source).counts_words
    return Evaluator(run.trainer, batches, counts_words, run.progress.evaluated)
