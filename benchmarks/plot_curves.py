"""Figures of training runs: perplexity against steps and against time."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from benchmarks import plot_style

LOSSES = ("losses.jsonl", "metrics.jsonl")  # of a run of an exported step, and of `flash-tf train`
EVALUATIONS = "evaluations.jsonl"
IN_SIGHT = 10  # times the lowest perplexity: the first steps would hide the last ones
POINTS = 150  # of a training curve, each the mean of as many steps as that needs


class Run(NamedTuple):
    """What a run left.

    Attributes:
      label: What stands beside its line.
      model: Whose colour it gets.
      steps: Of the training losses.
      losses: Mean negative log-likelihood of each step.
      seconds: Time of training up to each step, evaluations left out; empty where the run does not say.
      evaluations: Step -> validation loss.
    """

    label: str
    model: str
    steps: list[int]
    losses: list[float]
    seconds: list[float]
    evaluations: dict[int, float]


def read(folder: str, label: str | None = None) -> Run:
    """Reads the records in a model directory, whose name says which model it is unless `label` does.

    Raises:
      ValueError: When it holds none.
    """
    file = next((path for name in LOSSES if (path := Path(folder, name)).exists()), None)
    if file is None:
        raise ValueError(f"{folder} is no run: it has neither {' nor '.join(LOSSES)}")
    records = _lines(file)
    if not records:
        raise ValueError(f"{file} holds no step")
    name = label or Path(folder).resolve().name
    return Run(
        plot_style.look(name, [name])[0],
        _model_in(name),
        [record["step"] for record in records],
        [record["loss"] for record in records],
        _seconds(records, folder),
        {record["step"]: record["loss"] for record in _lines(Path(folder, EVALUATIONS))},
    )


def of_learning(path: str) -> list[Run]:
    """The longest run of each artifact in a result of `benchmarks.learning`, the best of several that are as long."""
    rows = [row for row in json.loads(Path(path).read_text())["rows"] if "curve" in row]  # one that diverged has none
    rows.sort(key=lambda row: (row["passes"], -row["validation_loss"]))
    return [_of_row(row) for row in {row["artifact"]: row for row in rows}.values()]


def _model_in(name):
    """The model that a name has in it; the name itself where it has none."""
    named = [model for model in plot_style.MODELS if re.search(rf"(^|[^a-z]){model}($|[^a-z_])", name)]
    return max(named, key=len, default=name)


def _of_row(row):
    model = _model_in(row["artifact"])
    curve = {name: [point[name] for point in row["curve"]] for name in ("step", "loss", "seconds")}
    evaluations = {record["step"]: record["loss"] for record in row["evaluations"]}
    return Run(plot_style.look(model, [model])[0], model, curve["step"], curve["loss"], curve["seconds"], evaluations)


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _seconds(records, folder):
    """The records' own `seconds`, or what follows from their rates and the tokens of a step."""
    if all("seconds" in record for record in records):
        return [record["seconds"] for record in records]
    config = Path(folder, "config.yaml")
    if not config.exists() or not all("tokens_per_second" in record for record in records):
        return []
    import yaml

    tokens = yaml.safe_load(config.read_text())["train"]["tokens_per_step"]
    return list(itertools.accumulate(tokens / record["tokens_per_second"] for record in records))


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """`curves`: perplexity against steps and, where every run knows its time, against that too."""
    if not runs:
        return {}
    timed = all(run.seconds for run in runs)
    figure, panels = plot_style.figure(2 if timed else 1)
    _draw(panels[0], runs, [run.steps for run in runs], "step")
    if timed:
        longest = max(run.seconds[-1] for run in runs)
        size, unit = next(
            (s, u) for s, u in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if longest >= s or s == 1
        )
        _draw(panels[1], runs, [[s / size for s in run.seconds] for run in runs], f"{unit} of training steps")
    plot_style.notes(figure, ["Thick, with points: validation. Thin: training, means over neighbouring steps."])
    return {"curves": figure}


def _draw(axes: Axes, runs, positions, xlabel):
    others = sorted({run.model for run in runs if run.model not in plot_style.MODELS})
    shown = []
    for run, at in zip(runs, positions, strict=True):
        _, color = plot_style.look(run.model, others)
        evaluated = {step: loss for step, loss in run.evaluations.items() if run.steps[0] <= step <= run.steps[-1]}
        x, y = _thinned(at, run.losses)
        label = "_training" if evaluated else run.label
        axes.plot(x, y, color=color, linewidth=0.9, alpha=0.55, label=label)
        points = [math.exp(loss) for loss in evaluated.values()]
        if evaluated:
            place = np.interp(list(evaluated), run.steps, at)
            axes.plot(place, points, "o-", color=color, linewidth=1.8, ms=4, label=run.label)
        shown += [*points, *y]
    axes.set_yscale("log")
    axes.set_ylim(min(shown) / 1.1, min(max(shown), IN_SIGHT * min(shown)) * 1.1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter("")
    axes.set_xlim(left=0)
    axes.set_ylabel("perplexity, exp(loss)")
    axes.set_xlabel(xlabel)
    plot_style.label_lines(axes)


def _thinned(at, losses):
    """Ends of groups of neighbouring steps, and exp of each group's mean loss."""
    size = -(-len(losses) // POINTS)
    groups = [slice(i, i + size) for i in range(0, len(losses), size)]
    return [at[g][-1] for g in groups], [math.exp(sum(losses[g]) / len(losses[g])) for g in groups]
