"""Curves of runs: loss, perplexity, throughput and gradient norm, and their figures in a table."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flash_tf.pictures import page, style
from flash_tf.pictures.records import Run, by_task

POINTS = 200  # of a curve, each the mean of as many records as that needs
BANDS = 4  # runs at most whose range is drawn: more would hide each other
HEAD = ("run", "steps", "last loss", "best validation", "perplexity", "at step", "tokens/s", "hours", "state")
NOTES = (
    "Last loss: the loss of the last step. Best validation: the lowest loss on the validation split, with its step; of "
    "language models in nats per token, with its perplexity. Tokens/s: the median over steps. Hours: the time of "
    "training steps, without evaluations and without pauses between two starts of a run. When a step was repeated "
    "after a crash, its last record counts. State: done, stopped early, the share of the planned steps, or the step "
    "where the loss was no longer a number."
)
LINES = "Lines show training: each point is the mean of neighbouring steps, the shade their range."


class Quantity(NamedTuple):
    """A quantity to draw.

    Attributes:
      name: Name of the file, without ending.
      title: Heading of the picture.
      label: The y axis, with its unit.
      caption: What the picture shows.
      values: The quantity of each record of a run.
      text: Format of a value at the end of a curve.
      logarithmic: Whether the y axis is.
      loss: The function of a loss that the quantity is, None if it is not one. Validation is drawn for these.
      of_task: Whether it can be compared only between runs of one task.
      of_tokens: Whether only runs whose loss is one of tokens have it.
      per_token: What the y axis adds where all losses are of tokens.
    """

    name: str
    title: str
    label: str
    caption: str
    values: Callable[[Run], np.ndarray]
    text: str
    logarithmic: bool = False
    loss: Callable[[np.ndarray], np.ndarray] | None = None
    of_task: bool = True
    of_tokens: bool = False
    per_token: str = ""

    def having(self, runs: Sequence[Run]) -> list[Run]:
        """The runs that have the quantity."""
        return [run for run in runs if run.task.of_tokens or not self.of_tokens]


QUANTITIES = (
    Quantity(
        "loss",
        "Loss",
        "loss",
        f"{LINES} Dots are validation. A cross marks the end of a run that diverged.",
        lambda run: run.loss,
        "{:.3f}",
        loss=np.asarray,
        per_token=" (nats per token)",
    ),
    Quantity(
        "perplexity",
        "Perplexity",
        "perplexity, exp(loss per token)",
        f"{LINES} Dots are validation. A cross marks the end of a run that diverged.",
        lambda run: run.loss,
        "{:,.2f}",
        logarithmic=True,
        loss=lambda x: np.exp(np.minimum(x, 700)),
        of_tokens=True,
    ),
    Quantity(
        "throughput",
        "Throughput",
        "throughput (tokens per second)",
        f"{LINES} The first loop of steps includes compilation. Evaluations are left out.",
        lambda run: run.rate,
        "{:,.0f}",
        of_task=False,
    ),
    Quantity(
        "gradient_norm",
        "Gradient norm",
        "gradient norm (before clipping)",
        f"{LINES} The norm belongs to the mean gradient of a step.",
        lambda run: run.gradient_norm,
        "{:.3g}",
        logarithmic=True,
    ),
)


def pictures(runs: Sequence[Run]) -> list[page.Picture]:
    """All pictures of some runs."""
    shown = [quantity for quantity in QUANTITIES if quantity.having(runs)]
    return [page.picture(one.name, one.title, _caption(one.having(runs), one), figure(runs, one)) for one in shown]


def _caption(runs, quantity):
    caption, groups = quantity.caption, by_task(runs)
    if quantity.of_task and len(groups) > 1:
        apart = "; ".join(f"{group[0].task}: {', '.join(run.label for run in group)}" for group in groups)
        caption += f" Different tasks cannot be compared and have panels of their own. {apart}."
    untimed = ", ".join(run.label for run in runs if run.seconds is None)
    if quantity.loss and untimed and len(runs) > 1:
        caption += f" Without times, so against steps alone: {untimed}."
    return caption


def figure(runs: Sequence[Run], quantity: Quantity) -> Figure:
    """A quantity of the runs that have it: a row of panels for each task, against steps and, for losses, time."""
    looks = {run.label: style.line_look(i) for i, run in enumerate(runs)}  # of all, so that all pictures agree
    runs = quantity.having(runs)
    groups = by_task(runs) if quantity.of_task else [list(runs)]
    timed = [run for run in runs if run.seconds is not None] if quantity.loss and len(runs) > 1 else []
    drawn, axes = style.figure(len(groups), 2 if timed else 1, 3.9 if len(groups) == 1 else 3.2 * len(groups))
    of_one = f" of {runs[0].label}" if len(runs) == 1 else ""
    style.title(drawn, f"{quantity.title}{of_one}")
    ends, beyond = [], False
    for row, group in zip(axes, groups, strict=True):
        panels = _Panels(row, quantity, group, looks, _unit(timed))
        ends += panels.ends
        beyond |= panels.beyond
        if len(groups) > 1:
            row[0].set_title(style.literal(str(group[0].task)), fontsize=9, loc="left")
    note = "Losses more than 1 above the highest start are drawn there." if beyond else ""
    style.legend(drawn, *_key(runs, quantity, looks), note=note)
    style.write_ends(drawn, ends)
    return drawn


class _Panels:
    """One task's runs, against steps and perhaps against time.

    Attributes:
      ends: The values to write at the ends of the curves.
      beyond: Whether a loss was too high to draw.
    """

    def __init__(self, row: Sequence[Axes], quantity: Quantity, runs: Sequence[Run], looks: dict, unit):
        self._quantity, self._runs, self._looks, self.ends = quantity, runs, looks, []
        self._highest = _highest(runs) if quantity.loss else math.inf
        losses = [run.loss[np.isfinite(run.loss)] for run in runs] if quantity.loss else []
        self.beyond = any((loss > self._highest).any() for loss in losses)
        self._fill(row[0], lambda run: run.steps)
        style.steps_on_x(row[0])
        of_tokens = all(run.task.of_tokens for run in runs)
        row[0].set_ylabel(quantity.label + (quantity.per_token if of_tokens else ""))
        if len(row) > 1:
            seconds, name = unit
            self._fill(row[1], lambda run: None if run.seconds is None else run.seconds / seconds)
            row[1].set_xlabel(f"training time ({name})")
            row[1].set_xlim(left=0)

    def _fill(self, axes, places):
        for run in self._runs:
            if (at := places(run)) is not None:
                self._curve(axes, run, np.asarray(at, float))
        known = np.concatenate([self._quantity.values(run) for run in self._runs])
        if self._quantity.logarithmic and (known[np.isfinite(known)] > 0).any():
            style.logarithmic(axes)
        elif not self._quantity.loss:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")

    def _curve(self, axes, run, at):
        """A line through means of neighbouring records and, among few runs, their range."""
        look, of = self._looks[run.label], self._quantity.loss or np.asarray
        x, mean, low, high = grouped(at, np.minimum(self._quantity.values(run), self._highest))
        mean, low, high = map(of, (mean, low, high))
        if len(self._runs) <= BANDS and len(x) < len(at):
            axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        axes.plot(x, mean, linewidth=1.5, marker="." if len(x) == 1 else "", **look)
        finite = np.flatnonzero(np.isfinite(mean))
        if not len(finite):
            return
        last, text = finite[-1], self._quantity.text
        if self._quantity.loss and run.diverged is not None:
            axes.plot(x[last], mean[last], "x", color=look["color"], ms=9, mew=2.5, zorder=4)
        else:
            self.ends.append(style.End(axes, x[last], mean[last], text.format(mean[last]), look["color"]))
        if self._quantity.loss:
            self._validation(axes, run, at)

    def _validation(self, axes, run, at):
        steps = [step for step, loss in run.evaluations.items() if math.isfinite(loss)]
        if not steps:
            return
        colour = self._looks[run.label]["color"]
        y = self._quantity.loss(np.minimum([run.evaluations[step] for step in steps], self._highest))
        x = np.interp(steps, run.steps, at)
        axes.plot(x, y, "o", color=colour, ms=4.5, mec="white", zorder=3)
        self.ends.append(style.End(axes, x[-1], y[-1], f"● {self._quantity.text.format(y[-1])}", colour))


def _highest(runs):
    """The highest loss in sight: a run that diverges must not take the others' space."""
    starts = [run.loss[np.isfinite(run.loss)][0] for run in runs if np.isfinite(run.loss).any()]
    return max(starts, default=math.inf) + 1


def _unit(timed):
    """Seconds, minutes or hours, by the longest run."""
    longest = max((run.seconds[-1] for run in timed), default=0)
    return (3600, "hours") if longest >= 3600 else (60, "minutes") if longest >= 60 else (1, "seconds")


def grouped(at: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Groups of neighbouring records: the end of each, and mean, lowest and highest of its finite values."""
    size = -(-len(at) // POINTS)
    groups = [values[i : i + size] for i in range(0, len(at), size)]
    ends = at[np.minimum(np.arange(size - 1, size * len(groups), size), len(at) - 1)]
    finite = [group[np.isfinite(group)] for group in groups]
    over = lambda of: np.array([of(group) if len(group) else np.nan for group in finite])  # noqa: E731
    return ends, over(np.mean), over(np.min), over(np.max)


def _key(runs, quantity, looks):
    """Handles and labels of the legend: the runs, and what lines, dots and crosses mean."""
    lines = [Line2D([], [], linewidth=2, **looks[run.label]) for run in runs]
    names = ["training"] if len(runs) == 1 else [run.label for run in runs]
    mark = {"color": style.GREY if len(runs) > 1 else looks[runs[0].label]["color"], "linestyle": "", "ms": 6}
    if quantity.loss and any(run.evaluations for run in runs):
        lines.append(Line2D([], [], marker="o", **mark))
        names.append("validation")
    if quantity.loss and any(run.diverged is not None for run in runs):
        lines.append(Line2D([], [], marker="x", mew=2, **mark))
        names.append("diverged")
    return lines, names


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """The short table, one row for each run, under `HEAD`."""
    return [[text(value) for value, text in zip(summary(run).values(), _TEXT, strict=True)] for run in runs]


def summary(run: Run) -> dict:
    """A run in figures; None where there is no value yet, or no finite one."""
    best, rates = run.best, run.rate[np.isfinite(run.rate)]
    loss = None if best is None else run.evaluations[best]
    return {
        "run": run.label,
        "steps": int(run.steps[-1]),
        "loss": _finite(run.loss[-1]),
        "best_validation_loss": loss,
        "best_validation_perplexity": _finite(_perplexity(loss)) if run.task.of_tokens and best is not None else None,
        "best_step": best,
        "tokens_per_second": float(np.median(rates)) if len(rates) else None,
        "hours": None if run.seconds is None else float(run.seconds[-1]) / 3600,
        "state": _state(run),
    }


def _perplexity(loss):
    return math.exp(min(loss, 700))  # of more, a float is too small


def _finite(x):
    return float(x) if math.isfinite(x) else None


def _state(run):
    if run.diverged is not None:
        return f"diverged at step {run.diverged:,}"
    if run.planned is None:
        return "?"
    if run.steps[-1] >= run.planned:
        return "done"
    return "stopped early" if run.stopped_early else f"{run.steps[-1] / run.planned:.0%} of {run.planned:,}"


def _spelt(pattern):
    return lambda value: "-" if value is None else pattern.format(value)


_TEXT = (
    str,
    _spelt("{:,}"),
    _spelt("{:.4f}"),
    _spelt("{:.4f}"),
    _spelt("{:,.2f}"),
    _spelt("{:,}"),
    _spelt("{:,.0f}"),
    _spelt("{:.3f}"),
    str,
)


def evaluations(runs: Sequence[Run]) -> list[page.Table]:
    """Every validation loss of every run, and its perplexity if it has one."""
    return [_evaluations(run) for run in runs if run.evaluations]


def _evaluations(run):
    columns = 3 if run.task.of_tokens else 2
    found = [[f"{s:,}", f"{x:.4f}", f"{_perplexity(x):,.2f}"][:columns] for s, x in run.evaluations.items()]
    head = ("step", "validation loss", "perplexity")[:columns]
    return page.Table(f"All evaluations of {run.label}", head, found, folded=True)
