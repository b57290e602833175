"""Runs of one config with different values, compared on validation."""

import itertools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from flash_tf import config as configs
from flash_tf import owned_files
from flash_tf.training import loop, preflight, run_directory
from flash_tf.training.progress import Progress
from flash_tf.training.run import DivergedError
from flash_tf.training.strategy import check_tensorflow

OPEN, CLOSE = "[{", "]}"


def sweep(
    name: str,
    overrides: Iterable[str],
    folder: str,
    progress: Progress,
    begins: Callable[[str], None] = lambda model_dir: None,
) -> dict:
    """Trains a config with every combination of values, each in a folder of its own. Finished runs stay as they are.

    Args:
      name: A config, as for `config.load`.
      overrides: Strings `key.of.option=value`, or `key.of.option=value,value` for values to choose from.
      folder: The local folder of the runs' folders.
      progress: Shows the state of the runs.
      begins: Called with the folder of each run once it is the run's.

    Returns:
      `runs`, for each the values that differ, its `model_dir` and the figures of its best evaluation by
      `evaluation.metric`, or what `diverged`; `best`, the best of them; and the `metric`.

    Raises:
      ValueError: There is nothing to choose from, or a config is not valid: nothing was trained. Or all runs diverged.
    """
    _check_local(folder)
    choices = dict(_choices(override) for override in overrides)
    varied = [key for key, values in choices.items() if len(values) > 1]
    if not varied:
        raise ValueError("sweep needs a --set with values to choose from, as optimizer.learning_rate=1e-4,3e-4")
    if "train.deterministic" in varied:
        raise ValueError("sweep trains in one process, which train.deterministic is for as a whole: give it one value")
    combinations = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    experiments = [configs.load(name, [f"{key}={value}" for key, value in one.items()]) for one in combinations]
    values = [{key: one[key] for key in varied} for one in combinations]
    folders = [f"{folder}/{','.join(f'{key}={value}' for key, value in one.items())}" for one in values]
    for experiment, model_dir in zip(experiments, folders, strict=True):
        check_tensorflow(experiment.strategy)
        if experiment.strategy.type == "multi_worker":
            raise ValueError(
                "sweep trains in one process, and multi_worker needs one for each run: use `flash-tf train`"
            )
        preflight.check(experiment, model_dir)
    rows = []
    for chosen, experiment, model_dir in zip(values, experiments, folders, strict=True):
        progress.line(f"training {model_dir}")
        rows.append({**chosen, "model_dir": model_dir, **_trained(experiment, model_dir, progress, begins)})
    metric, done = experiments[0].evaluation.metric, [row for row in rows if "diverged" not in row]
    if not done:
        raise ValueError(f"all {len(rows)} runs of the sweep diverged, the last one so: {rows[-1]['diverged']}")
    return {"runs": rows, "best": _best_of(done, metric), "metric": metric}


def _choices(override):
    """The key of an override, and the different values between its commas outside brackets."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"--set needs key=value, got {override!r}")
    values, depth = [""], 0
    for c in text:
        depth += (c in OPEN) - (c in CLOSE)
        if c == "," and depth == 0:
            values.append("")
        else:
            values[-1] += c
    return key, [*dict.fromkeys(value.strip() for value in values)]


def _check_local(folder):
    """Raises a ValueError unless the runs' records can be read as files."""
    if not owned_files.is_local(folder):
        raise ValueError(f"sweep needs a local folder for its runs, got {folder}")


def _trained(experiment, model_dir, progress, begins):
    """The figures of a run's best evaluation. A run that diverges is an answer too, and the others go on."""
    try:
        loop.train(experiment, model_dir, progress, begins=lambda: begins(model_dir))
    except DivergedError as error:
        progress.line(f"{model_dir} diverged: {error}")
        return {"diverged": str(error)}
    return _best(model_dir, experiment.evaluation.metric)


def _best(model_dir, metric):
    lines = Path(model_dir, run_directory.EVALUATIONS).read_text("utf-8").splitlines()
    return _best_of([json.loads(line) for line in lines], metric)


def _best_of(records, metric):
    """The best record; one whose figure is no number, of a split without a masked token, is the worst."""
    sign = -1 if metric == "loss" else 1
    return max(records, key=lambda record: -math.inf if math.isnan(record[metric]) else sign * record[metric])


def as_text(found: dict) -> str:
    """The result of `sweep` as a table for people, the best run marked."""
    names = [name for name in found["best"] if name != "model_dir"]
    rows = [names, *([_figure(row.get(name, "-")) for name in names] for row in found["runs"])]
    widths = [max(len(row[i]) for row in rows) + 2 for i in range(len(names))]
    lines = ["".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    marks = ["", *(_mark(row, found["best"]) for row in found["runs"])]
    return "\n".join(f"{line}{mark}" for line, mark in zip(lines, marks, strict=True))


def _mark(row, best):
    return "  diverged" if "diverged" in row else "  <- best" if row == best else ""


def _figure(value):
    return f"{value:,.4f}" if isinstance(value, float) else str(value)
