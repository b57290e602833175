"""A run: its state, its checkpoints and its records, for a trainer on any backend."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from flash_tf.config import Config
from flash_tf.data.stream import WindowStream
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training import run_directory
from flash_tf.training.checkpoints import Checkpoints
from flash_tf.training.inputs import make_cache, make_packing, make_tokenizer, prepared_text
from flash_tf.training.progress import Progress
from flash_tf.training.restore import check_tokenizer, starting_model
from flash_tf.training.tasks import TaskObjective


class DivergedError(ValueError):
    """The loss or a variable is not a number."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run, restored to where it was.

    Attributes:
      config: The experiment, with its masking written out.
      model_dir: The folder of the run, local or gs://.
      progress: Shows the state of the run.
      tokenizer: The run's tokenizer.
      objective: The training objective.
      model: The model.
      step: Steps done, a variable.
      chief: Whether this process writes the run's files.
      checkpoints: The run's checkpoints.
      replicas: The number of replicas, each with a share of a batch.
      saved: Step of the checkpoint that this process wrote or restored last.
      evaluated: Evaluations up to this step are done.
      evaluation: The last evaluation, with its `step`; empty before the first.
      best: The rank of the best evaluation; the lower, the better.
      waited: Evaluations since the best one.
    """

    config: Config
    model_dir: str
    progress: Progress
    tokenizer: Tokenizer
    objective: object
    model: keras.Model
    step: Any
    chief: bool
    checkpoints: Checkpoints
    replicas: int
    saved: int | None = None
    evaluated: int = 0
    evaluation: dict = dataclasses.field(default_factory=dict)
    best: float = math.inf
    waited: int = 0

    @property
    def position(self) -> int:
        """Windows read so far: the position in the stream of data."""
        return int(self.step.numpy()) * self.config.batch_size

    @property
    def values(self) -> Mapping[str, Any]:
        """The content of a checkpoint. Random numbers depend on the seed, the step and the position alone."""
        raise NotImplementedError

    def write(self, notes: dict) -> None:
        """Writes a checkpoint with these notes. Every process calls it."""
        raise NotImplementedError

    def save(self) -> None:
        """Saves a checkpoint of this step, with the validation loss if this step was evaluated.

        Raises:
          DivergedError: A variable is not finite. Every worker finds it, and the chief writes nothing.
        """
        step = int(self.step.numpy())
        new = step != self.saved
        if new and (bad := self.checkpoints.not_finite(self.values)) is not None:
            raise self.diverged(f"{bad} is not finite after step {step}")
        loss = self._ranked(self.evaluation) if self.evaluation.get("step") == step else {}
        waiting = {"best": self.best, "waited": self.waited} if math.isfinite(self.best) else {}
        if new:
            notes = {"step": step, "position": self.position, "seed": self.config.train.seed, **waiting}
            notes |= {"replicas": self.replicas}
            self.write({**notes, "tokenizer": self.tokenizer.fingerprint, **loss})
        elif loss and self.chief:
            self.checkpoints.note(step, {**loss, **waiting})
        if self.chief:
            self.checkpoints.prune(self.config.train.keep)
        self.saved = step

    def take(self, evaluation: dict) -> None:
        """Takes an evaluation of this step as the last one, and counts since which there was no better one."""
        self.evaluation = evaluation
        ranked = self._ranked(evaluation)
        rank = ranked.get("rank", ranked["loss"])
        self.best, self.waited = (rank, 0) if rank < self.best else (self.best, self.waited + 1)

    @property
    def stale(self) -> bool:
        """Whether `evaluation.patience` has ended the run."""
        patience = self.config.evaluation.patience
        return patience is not None and self.waited >= patience

    def _ranked(self, evaluation):
        """An evaluation's loss, and the rank that another metric gives the checkpoint."""
        metric = self.config.evaluation.metric
        rank = {} if metric == "loss" else {"rank": -evaluation[metric]}
        return {"loss": evaluation["loss"], **rank}

    def diverged(self, what: str) -> DivergedError:
        """The error of a run whose loss or variables are no longer numbers."""
        last = f"the last good checkpoint is of step {self.saved}"
        good = "there is no checkpoint yet" if self.saved is None else last
        advice = ["a lower optimizer.learning_rate", "a longer optimizer.warmup_steps"]
        if self.config.optimizer.clip is None:
            advice.append("optimizer.clip={scope: global, norm: 1.0}")
        if self.config.train.precision != "float32":
            advice.append("train.precision=float32")
        tried = f"{', '.join(advice[:-1])} or {advice[-1]}"
        return DivergedError(f"{what}; {good}; nothing was overwritten. Try another --model-dir with {tried}")

    def records(self, name: str, step: int) -> run_directory.Records:
        """A file of records, cut off after a step. Only the chief writes it."""
        return run_directory.Records(f"{self.model_dir}/{name}" if self.chief else None, step, self.progress.line)

    def begun(self) -> contextlib.AbstractContextManager:
        """Marks the model directory as this run's, before the first step."""
        if not self.chief:
            return contextlib.nullcontext()
        return run_directory.begun(self.model_dir, self.config, self.tokenizer.fingerprint)


def enter(
    config: Config,
    model_dir: str,
    checkpoints: Checkpoints,
    *,
    chief: bool,
    extends: bool,
    report: Callable[[str], None],
) -> tuple[keras.Model | None, Tokenizer]:
    """Claims the folder of a run. Returns the model that it starts from, of a new run alone, and its tokenizer."""
    start = None
    if config.init_from is not None and not checkpoints.steps():
        start = starting_model(config.init_from, report)
    if chief:
        run_directory.claim(model_dir, config, extends)
    return start, make_tokenizer(config, model_dir, chief=chief, report=report)


def begin_from(run: Run, start: keras.Model) -> None:
    """Takes the weights of another model, which has read the same token ids."""
    there = start.tokenizer
    if there is not None and there.fingerprint != run.tokenizer.fingerprint:
        raise ValueError(
            f"init_from {run.config.init_from} has another tokenizer than data.tokenizer {run.config.data.tokenizer}: "
            "leave data.tokenizer out, and the run takes the other's"
        )
    try:
        done = run.model.init_from(start)
    except ValueError as error:
        raise ValueError(f"init_from {run.config.init_from}: {error}") from error
    run.progress.line(f"starting from {run.config.init_from}: {done}")


def resume(run: Run, variables: Mapping[str, Any]) -> None:
    """Restores the newest checkpoint into some variables, if there is one."""
    if (notes := run.checkpoints.restore_newest(variables)) is None:
        _say_replicas(run, run.replicas)
        return
    _say_replicas(run, notes.get("replicas", run.replicas))
    check_tokenizer(run.tokenizer, notes, run.model_dir)
    run.step.assign(notes["step"])
    run.saved = notes["step"]
    run.evaluated = notes["step"] - ("loss" not in notes)
    run.best, run.waited = notes.get("best", math.inf), notes.get("waited", 0)
    run.progress.line(f"going on from step {notes['step']:,}")


def _say_replicas(run, before):
    """A line where the number of replicas decides what a run computes. Its checkpoints have the number."""
    clip, changed = run.config.optimizer.clip, before != run.replicas
    if clip is not None and clip.scope == "replica" and (run.replicas > 1 or changed):
        run.progress.line(
            f"optimizer.clip.scope replica clips the gradient of each of {run.replicas} replicas: "
            + (f"the run had {before}, and goes on as another one" if changed else "another number is another run")
        )


def check_batch(config: Config, devices: int, what: str) -> None:
    """Raises a ValueError unless the sequences of a step divide evenly."""
    if config.batch_size % (devices * config.train.accumulate):
        raise ValueError(
            f"{config.batch_size} sequences a step (train.tokens_per_step / data.sequence_length) must be "
            f"a multiple of {devices} {what} x train.accumulate {config.train.accumulate}"
        )


def open_stream(run: Run, of_prepared: Callable) -> Any:
    """The training windows of a run. A background thread begins to tokenize them, if they are not prepared.

    The rows of a task are made at once, of both splits, so that a bad example is known before the first step.

    Args:
      run: The run.
      of_prepared: Makes the stream of a `PreparedSplit`.

    Returns:
      A `WindowStream`, or what `of_prepared` makes.
    """
    config, packing = run.config, make_packing(run.config, run.objective, run.model)
    order = {"seed": config.train.seed, "limit": config.train.steps * config.batch_size}
    if (prepared := prepared_text(config, packing, run.tokenizer)) is not None:
        return of_prepared(prepared.splits["train"], **order)
    if isinstance(run.objective, TaskObjective):
        for split in ("train", "validation"):
            cache = make_cache(config, run.model_dir, run.tokenizer, split, run.progress.tokenized)
            left_out = sum(cache.get(index).left_out for index in range(len(cache.shards)))
            if left_out:
                why = "a label" if config.data.answerless_rows == 1 else "a label or an answer"
                run.progress.line(f"left out {left_out:,} {split} rows without {why}")
    cache = make_cache(config, run.model_dir, run.tokenizer, "train", run.progress.tokenized)
    return WindowStream(cache, packing, **order)


def evaluation_steps(run: Run) -> Iterator[int]:
    """The next steps at which to evaluate: every multiple of `evaluation.every`, and the last; none of a stale run."""
    step, last = run.evaluated, run.config.train.steps
    every = run.config.evaluation.every or last
    while step < last and not run.stale:
        step = min(step - step % every + every, last)
        yield step


def last_evaluation(run: Run, evaluate: Callable[[], dict]) -> dict:
    """The last evaluation of a run that has ended; `evaluate` is called if this process made none."""
    evaluation = run.config.evaluation
    if run.stale:
        run.progress.line(f"stopped early: no better {evaluation.metric} in {evaluation.patience} evaluations in a row")
    elif not run.evaluation:
        steps = run.config.train.steps
        run.progress.line(f"the run has all of its {steps:,} steps: evaluating the last one again")
    return run.evaluation or {"step": int(run.step.numpy()), **evaluate()}
