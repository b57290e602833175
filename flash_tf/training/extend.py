"""More steps for a run than it was planned with."""

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np

from flash_tf.config import Config
from flash_tf.training import schedule
from flash_tf.training.checkpoints import Checkpoints, DamagedCheckpoint


def extended(config: Config, model_dir: str, steps: int, constant: bool, report: Callable[[str], None]) -> Config:
    """The config of a run with more steps. The run keeps it, so that a resume does the same.

    The learning rate is the one of a run that was planned with all of the steps from the start. If it stays constant,
    it keeps its value at the newest checkpoint.

    Args:
      config: The run's config.
      model_dir: The model directory, with a checkpoint.
      steps: Of the whole run.
      constant: Whether the learning rate stays as it is.
      report: Called with a line about the learning rate if the config changes.

    Raises:
      ValueError: The run has no checkpoint, was planned with more steps, or has stopped early.
    """
    planned, optimizer = config.train.steps, config.optimizer
    if steps < planned:
        raise ValueError(f"--extend needs the steps of the whole run, {planned:,} or more, got {steps:,}")
    checkpoints = Checkpoints(f"{model_dir}/checkpoints")
    if not (saved := checkpoints.steps()):
        raise ValueError(f"{model_dir} has no checkpoint to go on from: set train.steps in its config")
    patience, waited = config.evaluation.patience, _waited(checkpoints, saved)
    if patience is not None and waited >= patience:
        raise ValueError(
            f"{model_dir} stopped early, after {waited} evaluations without a better {config.evaluation.metric}: "
            "it goes on with a larger evaluation.patience, or null"
        )
    if constant and optimizer.constant_after is None:
        plan = optimizer.schedule_steps or planned
        optimizer = dataclasses.replace(optimizer, schedule_steps=plan, constant_after=saved[-1])
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps), optimizer=optimizer)
    if longer != config:
        last, following = _rate(config, saved[-1] - 1), _rate(longer, saved[-1])
        report(f"{steps:,} steps instead of {planned:,}; the learning rate is {following:.2e}, after {last:.2e}")
    return longer


def _waited(checkpoints, saved):
    """Evaluations since the best one, by the newest checkpoint whose notes can be read."""
    for step in reversed(saved):
        with contextlib.suppress(DamagedCheckpoint):
            return checkpoints.notes(step).get("waited", 0)
    return 0


def _rate(config, done):
    return float(schedule.learning_rate(config.optimizer, config.train.steps, np.float32(done), np))
