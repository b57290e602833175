"""Figures of training steps against the context length: latency, speed-up, tokens per second, memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks import plot_style

Row = dict[str, Any]
TASKS = {"lm": "causal language model", "mlm": "masked language model"}
BASELINE = "transformer_plus_plus"


class Series(NamedTuple):
    """What one line shows.

    Attributes:
      model: Its name.
      framework: "TensorFlow", which is ours, "Keras on JAX", which is too, or "PyTorch".
      full_head: Whether a masked model's head runs on every position, where the others' runs on those predicted.
    """

    model: str
    framework: str
    full_head: bool

    @property
    def label(self) -> str:
        """What stands beside the line."""
        name = plot_style.MODELS.get(self.model, (self.model,))[0]
        parts = [name, *([self.framework] if self.framework != "TensorFlow" else [])]
        return ", ".join([*parts, *(["full head"] if self.full_head else [])])


def series_of(row: Row) -> Series:
    """The line that a row is a point of."""
    return Series(row["model"], row["framework"], row["task"].endswith("_full_head"))


def task_of(row: Row) -> str:
    """The task whose figures show a row."""
    return row["task"].removesuffix("_full_head")


def lines(rows: Sequence[Row], key: str, scale: float = 1.0) -> dict[Series, dict[int, float]]:
    """Each series' values of `key`, times `scale`, by context length; rows without it are left out.

    Raises:
      ValueError: When two rows are of one series and length.
    """
    found: dict[Series, dict[int, float]] = {}
    for row in sorted((row for row in rows if row.get(key) is not None), key=lambda row: row["n"]):
        points = found.setdefault(series_of(row), {})
        if row["n"] in points:
            raise ValueError(f"there are two results of {series_of(row).label}, {row['task']}, at n={row['n']}")
        points[row["n"]] = scale * row[key]
    return found


def speedups(rows: Sequence[Row]) -> tuple[Series | None, dict[Series, dict[int, float]]]:
    """How many times the baseline's latency is a series', where both were measured; and which the baseline is.

    It is the Transformer++ of the peers if there is one, else ours; with the head on the same positions as ours.
    """
    latency = lines(rows, "median_ms")
    candidates = [Series(BASELINE, framework, False) for framework in ("PyTorch", "TensorFlow")]
    baseline = next((one for one in candidates if one in latency), None)
    if baseline is None:
        return None, {}
    base = latency.pop(baseline)
    found = {one: {n: base[n] / y for n, y in points.items() if n in base} for one, points in latency.items()}
    return baseline, {one: points for one, points in found.items() if points}


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The figures of each task that has rows, by file name without ending.

    Raises:
      ValueError: When rows are of several devices or of different numbers of tokens a step.
    """
    for key in ("device", "tokens"):
        if len(different := sorted({str(row[key]) for row in rows})) > 1:
            raise ValueError(f"one figure compares results of one {key} alone, got {', '.join(different)}")
    found = {}
    for task in sorted({task_of(row) for row in rows}):
        found |= _figures_of_task(task, [row for row in rows if task_of(row) == task])
    return found


def _figures_of_task(task, rows):
    where = f"{TASKS.get(task, task)}, {rows[0]['tokens']:,} tokens a step, {rows[0]['device']}"
    latency, (baseline, ratios) = lines(rows, "median_ms"), speedups(rows)
    drawings = {
        "latency": (latency, "step latency (ms); bars: quartiles", []),
        "throughput": (lines(rows, "tokens_per_second", 1e-3), "thousand tokens per second", []),
        "memory": (lines(rows, "peak_bytes", 2**-30), "peak memory (GiB)", _kinds_of_memory(rows)),
    }
    if ratios:
        alone = sorted({n for points in latency.values() for n in points} - latency[baseline].keys())
        lacking = f"Without {baseline.label}, so without speed-up: {', '.join(map(plot_style.short, alone))}."
        drawings["speedup"] = (ratios, f"speed-up over {baseline.label}", [lacking] if alone else [])
    found = {
        f"{task}_{name}": _figure(drawn, ylabel, where, said + _notes(rows))
        for name, (drawn, ylabel, said) in drawings.items()
        if drawn
    }
    if latency:
        _quartiles(found[f"{task}_latency"].axes[0], rows)
    return found


def _kinds_of_memory(rows):
    """What the rows' memory is, where it is not the same."""
    there = [row for row in rows if row.get("peak_bytes")]
    laid_out = [row for row in there if row.get("runner") == "JAX"]
    mixed = 0 < len(laid_out) < len(there)
    return ["Of JAX's steps what XLA laid out, of the others the most that an allocator held."] if mixed else []


def _quartiles(axes, rows):
    """A bar from the first quartile to the third at each point; most are smaller than the marker."""
    for row in rows:
        if row.get("median_ms") is not None and "quartiles_ms" in row:
            _, color = plot_style.look(row["model"], [row["model"]])
            axes.vlines(row["n"], *row["quartiles_ms"], color=color, lw=4, alpha=0.4)


def _figure(drawn, ylabel, title, small_print):
    figure, (axes,) = plot_style.figure()
    others = sorted({one.model for one in drawn if one.model not in plot_style.MODELS})
    for one, points in drawn.items():
        _, color = plot_style.look(one.model, others)
        style = ":" if one.full_head else "-" if one.framework == "TensorFlow" else "--"
        fill = color if one.framework == "TensorFlow" else "white"
        axes.plot(
            points.keys(),
            points.values(),
            style,
            color=color,
            label=one.label,
            marker="o",
            markerfacecolor=fill,
            lw=1.8,
        )
    if ylabel.startswith("speed-up"):
        axes.axhline(1, color=plot_style.GREY, linewidth=1, label="_baseline")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", fontsize=10)
    plot_style.lengths_on_x(axes, {n for points in drawn.values() for n in points})
    plot_style.label_lines(axes)
    plot_style.notes(figure, small_print)
    return figure


def _notes(rows):
    """Commits, what is timed, and what could not be."""
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    said = [f"Forward, backward and update; median of the steps after warm-up. Commit {commits}."]
    failed = [
        f"{series_of(row).label} at {plot_style.short(row['n'])}: {row['error']}" for row in rows if "error" in row
    ]
    return said + (["Not shown: " + "; ".join(failed) + "."] if failed else [])
