"""Curves of runs: loss and perplexity against steps and against time, throughput, gradient norm."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flash_tf.pictures import page, style
from flash_tf.pictures.records import Run

POINTS = 200  # of a curve, each the mean of as many records as that needs
BANDS = 4  # runs at most whose spread is drawn: more would hide each other
HEAD = ("run", "steps", "last loss", "best validation", "perplexity", "at step", "tokens/s", "hours", "state")
NOTES = (
    "Last loss: of the last step. Best validation: the lowest loss on the validation split, in nats a token, with its "
    "perplexity and step. Tokens/s: the median over steps. Hours: of training steps alone; evaluations, and the time "
    "between the starts of a run that was resumed, are left out. Of a step that was repeated after a crash the last "
    "record stands. State: done, the share of the planned steps, or where the loss was no number any more."
)


def pictures(runs: Sequence[Run]) -> list[page.Picture]:
    """All pictures of some runs."""
    timed = [run for run in runs if run.seconds is not None]
    untimed = ", ".join(run.label for run in runs if run.seconds is None)
    lines = "Lines are training, each point the mean of neighbouring steps, the shade their range; dots are validation"
    caption = f"{lines}; a cross is where a run stopped having a loss."
    if untimed:
        caption += f" Without times, so against steps alone: {untimed}."
    return [
        page.picture("loss", "Loss", caption, _against_both(runs, timed, "loss (nats a token)")),
        page.picture("perplexity", "Perplexity", caption, _against_both(runs, timed, "perplexity, exp(loss)", _exp)),
        page.picture(
            "throughput",
            "Throughput",
            "Tokens a second of training steps; the first loop includes compilation. Evaluations are left out.",
            _alone(runs, [run.rate for run in runs], "tokens per second"),
        ),
        page.picture(
            "gradient_norm",
            "Gradient norm",
            "Norm of a step's mean gradient before global clipping; the shade is the range of neighbouring steps.",
            _alone(runs, [run.gradient_norm for run in runs], "gradient norm", logarithmic=True),
        ),
    ]


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """The short table, one row a run, under `HEAD`."""
    return [[text(value) for value, text in zip(summary(run).values(), _TEXT, strict=True)] for run in runs]


def summary(run: Run) -> dict:
    """A run in figures; None where there is none yet, or where it is not finite."""
    best, rates = run.best, run.rate[np.isfinite(run.rate)]
    loss = None if best is None else run.evaluations[best]
    return {
        "run": run.label,
        "steps": int(run.steps[-1]),
        "loss": _finite(run.loss[-1]),
        "best_validation_loss": loss,
        "best_validation_perplexity": None if loss is None else _finite(math.exp(min(loss, 700))),
        "best_step": best,
        "tokens_per_second": float(np.median(rates)) if len(rates) else None,
        "hours": None if run.seconds is None else float(run.seconds[-1]) / 3600,
        "state": _state(run),
    }


def _exp(x):
    """exp(x), bounded by what float64 holds."""
    return np.exp(np.minimum(x, 700))


def _finite(x):
    return float(x) if math.isfinite(x) else None


def _state(run):
    if run.diverged is not None:
        return f"diverged at step {run.diverged:,}"
    if run.planned is None:
        return "?"
    return "done" if run.steps[-1] >= run.planned else f"{run.steps[-1] / run.planned:.0%} of {run.planned:,}"


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
    """Every validation loss of every run."""
    head = ("step", "validation loss", "perplexity")
    return [
        page.Table(
            f"All evaluations of {run.label}",
            head,
            [[f"{s:,}", f"{x:.4f}", f"{math.exp(min(x, 700)):,.2f}"] for s, x in run.evaluations.items()],
            folded=True,
        )
        for run in runs
        if run.evaluations
    ]


def _against_both(runs, timed, ylabel, of=None) -> Figure:
    """A panel against steps and, where any run knows its time, one against time; logarithmic where `of` is given."""
    figure, axes = style.figure(1, 2 if timed else 1, 4.2)
    highest, (size, unit) = _highest(runs), _unit(timed)
    for i, run in enumerate(runs):
        _validated(axes[0, 0], run, run.steps, of, highest, i, len(runs))
        if run.seconds is not None:
            _validated(axes[0, 1], run, run.seconds / size, of, highest, i, len(runs))
    for one in axes.flat:
        if of is not None:
            style.logarithmic(one)
    axes[0, 0].set_ylabel(ylabel)
    style.steps_on_x(axes[0, 0])
    if timed:
        axes[0, 1].set_xlabel(f"{unit} of training steps")
        axes[0, 1].set_xlim(left=0)
    beyond = any((run.loss[np.isfinite(run.loss)] > highest).any() for run in runs)
    style.note(figure, "Losses more than 1 nat above the highest start are drawn there." if beyond else "")
    style.legend(figure, *_key(runs, marks=True))
    return figure


def _highest(runs):
    """The highest loss in sight: a run that diverges must not take the others' space."""
    starts = [run.loss[np.isfinite(run.loss)][0] for run in runs if np.isfinite(run.loss).any()]
    return max(starts, default=math.inf) + 1


def _unit(timed):
    """Seconds, minutes or hours, by the longest run."""
    longest = max((run.seconds[-1] for run in timed), default=0)
    return (3600, "hours") if longest >= 3600 else (60, "minutes") if longest >= 60 else (1, "seconds")


def _validated(axes: Axes, run, at, of, highest, i, many):
    """Training as a line, validation as dots, and a cross where the run diverged; nothing above `highest`."""
    look = style.line_look(i)
    x, y = _curve(axes, at, np.minimum(run.loss, highest), look, many, of)
    if run.diverged is not None and np.isfinite(y).any():
        last = np.flatnonzero(np.isfinite(y))[-1]
        axes.plot(x[last], y[last], "x", color=look["color"], ms=9, mew=2.5, zorder=4)
    steps = [step for step, loss in run.evaluations.items() if math.isfinite(loss)]
    if steps:
        losses = np.minimum([run.evaluations[step] for step in steps], highest)
        y = losses if of is None else of(losses)
        axes.plot(np.interp(steps, run.steps, at), y, "o", color=look["color"], ms=4.5, mec="white", zorder=3)


def _alone(runs, columns, ylabel, logarithmic=False) -> Figure:
    """One panel against steps."""
    figure, axes = style.figure(1, 1, 3.6)
    (one,) = axes.flat
    for i, (run, column) in enumerate(zip(runs, columns, strict=True)):
        _curve(one, run.steps, column, style.line_look(i), len(runs))
    known = np.concatenate(columns)
    if logarithmic and (known[np.isfinite(known)] > 0).any():
        style.logarithmic(one)
    else:
        one.set_ylim(bottom=0)
        one.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
    one.set_ylabel(ylabel)
    style.steps_on_x(one)
    style.legend(figure, *_key(runs))
    return figure


def _curve(axes, at, values, look, many, of=None):
    """A line through `of` means of neighbouring records and, among few runs, their range; returns the line's points."""
    x, *lines = grouped(np.asarray(at, float), values)
    mean, low, high = lines if of is None else map(of, lines)
    if many <= BANDS and len(x) < len(at):
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.plot(x, mean, linewidth=1.5, marker="." if len(x) == 1 else "", **look)
    return x, mean


def grouped(at: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Groups of neighbouring records: where each ends, and mean, lowest and highest of its values that are numbers."""
    size = -(-len(at) // POINTS)
    groups = [values[i : i + size] for i in range(0, len(at), size)]
    ends = at[np.minimum(np.arange(size - 1, size * len(groups), size), len(at) - 1)]
    finite = [group[np.isfinite(group)] for group in groups]
    over = lambda of: np.array([of(group) if len(group) else np.nan for group in finite])  # noqa: E731
    return ends, over(np.mean), over(np.min), over(np.max)


def _key(runs, marks=False):
    """Handles and labels of a legend: the runs and, if asked, what dots and crosses are."""
    found = [(Line2D([], [], linewidth=2, **style.line_look(i)), run.label) for i, run in enumerate(runs)]
    mark = {"color": style.GREY, "linestyle": "", "ms": 6}
    if marks and any(run.evaluations for run in runs):
        found.append((Line2D([], [], marker="o", **mark), "validation"))
    if marks and any(run.diverged is not None for run in runs):
        found.append((Line2D([], [], marker="x", mew=2, **mark), "diverged"))
    return tuple(zip(*found, strict=True))
