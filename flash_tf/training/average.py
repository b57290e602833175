"""The mean of a run's last weights, as a model directory."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flash_tf import config as configs
from flash_tf import owned_files, presets
from flash_tf.training import modelling, run_directory
from flash_tf.training.checkpoints import Checkpoints, DamagedCheckpoint
from flash_tf.training.restore import check_tokenizer, load_tokenizer

WRITER = "flash-tf average"


def average(model_dir: str, last: int, out: str, report: Callable[[str], None]) -> list[int]:
    """Writes a model directory with one checkpoint: the mean of the weights of a run's last good checkpoints.

    It has no optimizer's state, so it can be read, or start a new run, and not go on.

    Args:
      model_dir: The model directory of the run, local or gs://.
      last: The number of checkpoints.
      out: A local folder that is new, empty or an older average, which is replaced.
      report: Called with a line about each damaged checkpoint, which is left out.

    Returns:
      The steps of the checkpoints, the newest first.

    Raises:
      ValueError: The run has fewer good checkpoints, or the folder holds something else.
    """
    if last < 1:
        raise ValueError(f"--last must be 1 or more, got {last}")
    config = run_directory.load_config(model_dir)
    owned_files.check_folder(out, WRITER, _older)  # before the work
    tokenizer = load_tokenizer(config, model_dir)
    variables = {v.path: v for v in modelling.make_model(config, presets.build_unfilled).weights}
    steps, sums = _sums(model_dir, tokenizer, variables, last, config.train.keep, report)
    if len(steps) < last:
        raise ValueError(
            f"{model_dir} has {len(steps)} good checkpoints to average, --last asks for {last}: "
            "train.keep says how many a run keeps"
        )
    for name, variable in variables.items():
        variable.assign((sums[name] / last).astype(variable.dtype))
    if owned_files.is_local(model_dir) and config.data.cache is None:  # it need not tokenize the same text again
        cache = f"{os.path.abspath(model_dir)}/tokens"
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache=cache))
    with owned_files.replacing(out, WRITER, _older) as folder:
        notes = {"step": steps[0], "tokenizer": tokenizer.fingerprint, "average_of": steps}
        Checkpoints(f"{folder}/checkpoints").save({name: v.value for name, v in variables.items()}, notes)
        tokenizer.save(f"{folder}/{tokenizer.file}")
        Path(folder, run_directory.CONFIG).write_text(configs.dump(config))
    return steps


def _sums(model_dir, tokenizer, variables, last, keep, report):
    """The steps of the last good checkpoints, and the sums of their variables in float64."""
    checkpoints, steps = Checkpoints(f"{model_dir}/checkpoints"), []
    sums = {name: np.zeros(v.shape, np.float64) for name, v in variables.items()}
    for step in reversed(checkpoints.steps()[-keep:]):  # an older one is the best, which a run keeps too
        try:
            notes = checkpoints.restore(variables, step)
        except DamagedCheckpoint as error:
            report(f"{error}; leaving it out")
            continue
        check_tokenizer(tokenizer, notes, model_dir)
        steps.append(step)
        for name, variable in variables.items():
            sums[name] += variable.numpy()
        if len(steps) == last:
            break
    return steps, sums


def _older(folder):
    return ()
