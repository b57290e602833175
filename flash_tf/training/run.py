"""A training run: its model, tokenizer, data, step and checkpoints, restored to where it was."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator

import keras
import orbit
import tensorflow as tf

from flash_tf import owned_files
from flash_tf.config import Config, TokenizerConfig
from flash_tf.data import tokenizers
from flash_tf.data.packing import Packing
from flash_tf.data.prepared import Prepared
from flash_tf.data.prepared_input import PreparedStream
from flash_tf.data.rows import RowCache, RowPacking, placed
from flash_tf.data.sources import SOURCES
from flash_tf.data.sources.prepared import PreparedText
from flash_tf.data.stream import WindowStream
from flash_tf.data.token_cache import TokenCache
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.data.tokenizers import word_level
from flash_tf.training import modelling, run_directory
from flash_tf.training.checkpoints import Checkpoints, not_finite
from flash_tf.training.evaluator import per_replica
from flash_tf.training.optimizer import AdamW
from flash_tf.training.progress import Progress
from flash_tf.training.restore import check_tokenizer, load_tokenizer, starting_model
from flash_tf.training.strategy import is_chief
from flash_tf.training.tasks import TaskObjective, objective_of
from flash_tf.training.trainer import Trainer, TrainStep, uses_xla

WAIT = 600  # seconds that other workers give the chief to make a tokenizer


class DivergedError(ValueError):
    """The loss or a variable is not a number."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run, restored to where it was.

    Attributes:
      config: The experiment, with its masking written out.
      model_dir: The folder of the run, local or gs://.
      progress: Shows the state of the run.
      strategy: The strategy of the variables.
      tokenizer: The run's tokenizer.
      objective: The training objective.
      model: The model.
      optimizer: The optimizer of the model's variables.
      step: Steps done.
      checkpoints: The run's checkpoints.
      saved: Step of the checkpoint that this process wrote or restored last.
      evaluated: Evaluations up to this step are done.
      evaluation: The last evaluation, with its `step`; empty before the first.
      best: The rank of the best evaluation; the lower, the better.
      waited: Evaluations since the best one.
    """

    config: Config
    model_dir: str
    progress: Progress
    strategy: tf.distribute.Strategy
    tokenizer: Tokenizer
    objective: object
    model: keras.Model
    optimizer: AdamW
    step: tf.Variable
    checkpoints: Checkpoints
    saved: int | None = None
    evaluated: int = 0
    evaluation: dict = dataclasses.field(default_factory=dict)
    best: float = math.inf
    waited: int = 0

    @property
    def chief(self) -> bool:
        return is_chief(self.strategy)

    @property
    def position(self) -> int:
        """Windows read so far: the position in the stream of data."""
        return int(self.step.numpy()) * self.config.batch_size

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The content of a checkpoint. Random numbers depend on the seed, the step and the position alone."""
        return {**self.weights, **self.optimizer.state()}

    @property
    def weights(self) -> dict[str, tf.Variable]:
        return {v.path: v.value for v in self.model.weights}

    def save(self) -> None:
        """Saves a checkpoint of this step, with the validation loss if this step was evaluated.

        Raises:
          DivergedError: A variable is not finite. Every worker finds it, and the chief writes nothing.
        """
        step = int(self.step.numpy())
        new = step != self.saved
        if new and (bad := not_finite((name, v.numpy()) for name, v in self.variables.items())) is not None:
            raise self.diverged(f"{bad} is not finite after step {step}")
        if self.chief:
            loss = self._ranked(self.evaluation) if self.evaluation.get("step") == step else {}
            waiting = {"best": self.best, "waited": self.waited} if math.isfinite(self.best) else {}
            if new:
                notes = {"step": step, "position": self.position, "seed": self.config.train.seed, **waiting}
                self.checkpoints.save(self.variables, {**notes, "tokenizer": self.tokenizer.fingerprint, **loss})
            elif loss:
                self.checkpoints.note(step, {**loss, **waiting})
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
        return DivergedError(
            f"{what}; {good}; nothing was overwritten. Try another --model-dir with a lower optimizer.learning_rate, a "
            "longer optimizer.warmup_steps, optimizer.clip={scope: global, norm: 1.0}, or train.precision=float32"
        )

    def records(self, name: str, step: int) -> run_directory.Records:
        """A file of records, cut off after a step. Only the chief writes it."""
        return run_directory.Records(f"{self.model_dir}/{name}" if self.chief else None, step, self.progress.line)

    def begun(self) -> contextlib.AbstractContextManager:
        """Marks the model directory as this run's, before the first step."""
        if not self.chief:
            return contextlib.nullcontext()
        return run_directory.begun(self.model_dir, self.config, self.tokenizer.fingerprint)


def open_run(
    config: Config, model_dir: str, strategy: tf.distribute.Strategy, progress: Progress, extends: bool = False
) -> Run:
    """Makes a run's model and optimizer under the strategy's scope, and restores the newest checkpoint.

    Nobody else may write the model directory meanwhile; see `Owner`.

    Raises:
      ValueError: The config is not valid, or the model directory holds another run.
    """
    config = modelling.with_masking(config)
    replicas, accumulate = strategy.num_replicas_in_sync, config.train.accumulate
    if config.batch_size % (replicas * accumulate):
        raise ValueError(
            f"{config.batch_size} sequences a step (train.tokens_per_step / data.sequence_length) must be "
            f"a multiple of {replicas} replicas x train.accumulate {accumulate}"
        )
    checkpoints = Checkpoints(f"{model_dir}/checkpoints", progress.line)
    start = None
    if config.init_from is not None and not checkpoints.steps():
        start = starting_model(config.init_from, progress.line)
    if is_chief(strategy):
        run_directory.claim(model_dir, config, extends)
    tokenizer = make_tokenizer(config, model_dir, chief=is_chief(strategy), report=progress.line)
    keras.utils.set_random_seed(config.train.seed)
    with strategy.scope():
        model = modelling.make_model(config)
        trained = {v.path: v.value for v in model.trainable_variables}
        optimizer = AdamW(config.optimizer, config.train.steps, trained, jit_compile=uses_xla(config, model))
        step = orbit.utils.create_global_step()
    run = Run(
        config=config,
        model_dir=model_dir,
        progress=progress,
        strategy=strategy,
        tokenizer=tokenizer,
        objective=objective_of(config)(config, tokenizer),
        model=model,
        optimizer=optimizer,
        step=step,
        checkpoints=checkpoints,
    )
    if start is not None:
        _begin(run, start)
    if (notes := run.checkpoints.restore_newest(run.variables)) is not None:
        check_tokenizer(tokenizer, notes, model_dir)
        step.assign(notes["step"])
        run.saved = notes["step"]
        run.evaluated = notes["step"] - ("loss" not in notes)
        run.best, run.waited = notes.get("best", math.inf), notes.get("waited", 0)
        progress.line(f"going on from step {notes['step']:,}")
    return run


def _begin(run, start):
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


def prepared_text(config: Config, packing: Packing | RowPacking, tokenizer: Tokenizer) -> Prepared | None:
    """The windows of a source that is prepared; None for other sources.

    Raises:
      ValueError: They are of another packing or another tokenizer.
    """
    source = SOURCES.build(config.data.source)
    if not isinstance(source, PreparedText):
        return None
    source.prepared.check(packing, tokenizer.fingerprint)
    return source.prepared


def open_stream(run: Run) -> WindowStream | PreparedStream:
    """The training windows of a run. A background thread begins to tokenise them, if they are not prepared.

    The rows of a task are made at once, of both splits, so that a bad example is known before the first step.
    """
    config, packing = run.config, make_packing(run.config, run.objective, run.model)
    order = {"seed": config.train.seed, "limit": config.train.steps * config.batch_size}
    if (prepared := prepared_text(config, packing, run.tokenizer)) is not None:
        return PreparedStream(prepared.splits["train"], **order)
    if isinstance(run.objective, TaskObjective):
        for split in ("train", "validation"):
            cache = make_cache(config, run.model_dir, run.tokenizer, split, run.progress.tokenised)
            left_out = sum(cache.get(index).left_out for index in range(len(cache.shards)))
            if left_out:
                run.progress.line(f"left out {left_out:,} {split} rows without a label")
    cache = make_cache(config, run.model_dir, run.tokenizer, "train", run.progress.tokenised)
    return WindowStream(cache, packing, **order)


def make_packing(config: Config, objective, model: keras.Model) -> Packing | RowPacking:
    """The rule by which a config's shards become windows or rows."""
    if isinstance(objective, TaskObjective):
        return RowPacking(objective.encoder.fields)
    return Packing(
        kind=config.data.packing,
        sequence_length=config.data.sequence_length,
        overlap=objective.overlap,
        align=model.align,
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

    return Trainer(
        step=TrainStep(run.model, run.objective, run.optimizer, config, jit_compile=uses_xla(config, run.model)),
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


def make_tokenizer(config: Config, model_dir: str, *, chief: bool, report: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of a run: the one in the model directory, else the config's or `init_from`'s, else a new one.

    It is saved in the model directory.

    Args:
      config: The experiment.
      model_dir: The model directory.
      chief: Whether this process makes the tokenizer. Others wait for it.
      report: Called with a line before a new tokenizer is trained.

    Raises:
      ValueError: It does not fit the vocabulary, the text is too small for a new one, or the chief is too late.
    """
    if tokenizers.find(model_dir) is None and chief:
        tokenizer = _new_tokenizer(config, report)
        path = f"{model_dir}/{tokenizer.file}"
        tokenizer.save(f"{path}.partial")
        tf.io.gfile.rename(f"{path}.partial", path, overwrite=True)
    deadline = time.monotonic() + WAIT
    while tokenizers.find(model_dir) is None:
        if time.monotonic() > deadline:
            raise ValueError(
                f"worker 0 did not write a tokenizer to {model_dir} within {WAIT} s: is it running with this folder?"
            )
        time.sleep(1)
    return load_tokenizer(config, model_dir)


def _new_tokenizer(config, report):
    """The config's tokenizer or `init_from`'s, else a new one."""
    data, needed = config.data, config.model["vocabulary_size"]
    if (own := tokenizer_of_words(config)) is not None:
        return own
    trained = TokenizerConfig() if data.tokenizer is None else data.tokenizer
    given = data.tokenizer if isinstance(data.tokenizer, str) else config.init_from  # whose weights know its ids
    given = given or getattr(SOURCES.build(data.source), "tokenizer", None)
    if given is not None:
        return Tokenizer.load(given, needed)
    report(
        f"training a tokenizer of {needed:,} {'words' if trained.train == 'word' else 'pieces'} on the training split"
    )
    return Tokenizer.train(_documents(config), needed, data.whitespace, trained.train, trained.byte_fallback)


def tokenizer_of_words(config: Config) -> Tokenizer | None:
    """The tokenizer of a source that has words of its own, else None.

    Raises:
      ValueError: The words do not fit the vocabulary size, or there is another tokenizer.
    """
    words, where = getattr(SOURCES.build(config.data.source), "words", None), f"source {config.data.source['type']}"
    if words is None:
        return None
    if config.data.tokenizer is not None:
        raise ValueError(f"{where} has words of its own: leave data.tokenizer out")
    return word_level.of_pieces([*word_level.SPECIAL, *words], config.model["vocabulary_size"], where=where)


def _documents(config):
    source, encoder = SOURCES.build(config.data.source), objective_of(config).encoder_of(config, None)
    for shard in source.shards("train"):
        if encoder is None:
            yield from source.documents("train", shard)
        else:
            yield from (text for example in placed(source, "train", shard) for text in encoder.texts(example))


def make_cache(
    config: Config, model_dir: str, tokenizer: Tokenizer, split: str, on_progress: Callable[[int, int, str], None]
) -> TokenCache:
    """The tokens or rows of a split, on disk in the model directory or in the folder of `data.cache`."""
    folder, source = os.path.expanduser(tokens_folder(config, model_dir)), SOURCES.build(config.data.source)
    if (encoder := objective_of(config).encoder_of(config, tokenizer)) is not None:
        return RowCache(folder, source, tokenizer, split, encoder, on_progress)
    return TokenCache(folder, source, tokenizer, split, on_progress)


def tokens_folder(config: Config, model_dir: str) -> str:
    """The folder of a run's tokens; ValueError if it is in a bucket."""
    folder = config.data.cache or f"{model_dir}/tokens"
    if not owned_files.is_local(folder):
        raise ValueError(f"tokens need a local disk: set data.cache to a local folder, got {folder}")
    return folder
