"""The trained model of a run, without its data, optimizer or strategy."""

import dataclasses
import os
from collections.abc import Callable, Iterable

import keras
from etils import epath

from flash_tf import presets
from flash_tf.config import Config
from flash_tf.data import tokenizers
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.models.language_model import LanguageModel
from flash_tf.training import modelling, run_directory
from flash_tf.training.checkpoints import Checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model.

    Attributes:
      config: The run's config.
      model: The model with the weights of `step`, and its `tokenizer`.
      tokenizer: The model's tokenizer.
      step: The number of steps that trained the weights.
    """

    config: Config
    model: keras.Model
    tokenizer: Tokenizer
    step: int


def restore(
    model_dir: str,
    report: Callable[[str], None] = lambda line: None,
    checkpoint: str | int = "best",
    overrides: Iterable[str] = (),
) -> Trained:
    """Reads the model of a run.

    If the checkpoint is damaged, the newest good one takes its place, and a line says so.

    Args:
      model_dir: The model directory, local or gs://.
      report: Called with a line when something needs saying.
      checkpoint: "best", by validation loss; "newest"; or a step, in whose place no other checkpoint is taken.
      overrides: Options of the config in place of the run's, `key.of.option=value`.

    Raises:
      ValueError: The folder is no model directory, has no weights, is damaged, or its tokenizer is another one; or an
        override does not fit the run.
    """
    config = run_directory.load_config(model_dir, overrides)
    checkpoints = Checkpoints(f"{model_dir}/checkpoints", report)
    if not checkpoints.steps():
        if epath.Path(f"{model_dir}/weights/manifest.json").exists():
            raise ValueError(f"{model_dir} needs checkpoints, got weights of an exported step, which are read no more")
        raise ValueError(f"{model_dir} has no checkpoint yet: `flash-tf train` saves one")
    tokenizer = load_tokenizer(config, model_dir)
    model = modelling.make_model(config, presets.build_unfilled)
    model.tokenizer = tokenizer
    notes = _restored({v.path: v for v in model.weights}, checkpoints, checkpoint)
    check_tokenizer(tokenizer, notes, model_dir)
    cache = config.data.cache
    known = cache is None or epath.Path(os.path.expanduser(cache)).is_dir()
    if "average_of" in notes and not known:  # its run has been moved
        beside = epath.Path(model_dir).resolve().parent / "tokens"
        cache = str(beside) if beside.is_dir() else None
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache=cache))
    return Trained(config=config, model=model, tokenizer=tokenizer, step=notes["step"])


def starting_model(path: str, report: Callable[[str], None]) -> LanguageModel:
    """The model of a run or of a preset, for a new run that starts from its weights."""
    try:
        if epath.Path(f"{path}/{presets.CONFIG}").exists():
            return LanguageModel.from_preset(path)
        return restore(path, report).model
    except ValueError as error:
        raise ValueError(f"init_from needs a run or a preset: {error}") from error


def _restored(variables, checkpoints, wanted):
    """The notes of the checkpoint that was restored. A run that goes on may remove those that were just listed."""
    while True:
        steps = checkpoints.steps()
        try:
            return checkpoints.restore_first(variables, _order(checkpoints, steps, wanted))
        except ValueError:
            if checkpoints.steps() == steps or isinstance(wanted, int):
                raise


def _order(checkpoints, steps, wanted):
    """The steps of the checkpoints to try, the wanted one first."""
    if isinstance(wanted, int):
        if wanted not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"{checkpoints.directory} has no checkpoint of step {wanted}, it has {there}")
        return [wanted]
    best = checkpoints.best() if wanted == "best" else None
    first = [] if best is None else [best]
    return first + [step for step in reversed(steps) if step not in first]


def load_tokenizer(config: Config, model_dir: str) -> Tokenizer:
    """The tokenizer in a model directory."""
    return Tokenizer.load(
        tokenizers.find(model_dir) or f"{model_dir}/{tokenizers.TOKENIZERS[0]}", config.model["vocabulary_size"]
    )


def check_tokenizer(tokenizer: Tokenizer, notes: dict, model_dir: str) -> None:
    """Raises a ValueError unless the tokenizer is the one that a checkpoint's notes name. Old notes name none."""
    if notes.get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise ValueError(
            f"{model_dir}/{tokenizer.file} is another tokenizer than the run was trained with: put the run's own back"
        )
