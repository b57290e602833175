"""Figures of decoding against the text that came before: milliseconds a token, and bytes of state."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks import plot_style

PANELS = (("ms_per_token", 1.0, "milliseconds a token"), ("state_bytes", 2**-20, "state of a text (MiB)"))


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    """`decode`, or nothing without rows.

    Raises:
      ValueError: When rows are of several devices or numbers of texts.
    """
    for key in ("device", "batch"):
        if len(different := sorted({str(row[key]) for row in rows})) > 1:
            raise ValueError(f"one figure compares results of one {key} alone, got {', '.join(different)}")
    if not rows:
        return {}
    drawn, panels = plot_style.figure(2)
    names = list(dict.fromkeys(row["model"] for row in rows))
    for axes, (key, scale, label) in zip(panels, PANELS, strict=True):
        for name in names:
            points = sorted((row["context"], scale * row[key]) for row in rows if row["model"] == name)
            text, color = plot_style.look(name, [n for n in names if n not in plot_style.MODELS])
            axes.plot(*zip(*points, strict=True), color=color, label=text, marker="o", lw=1.8)
        axes.set_yscale("log")
        axes.set_ylabel(label)
        plot_style.lengths_on_x(axes, {row["context"] for row in rows})
        plot_style.label_lines(axes)
    where = f"{rows[0]['batch']} text{'s' * (rows[0]['batch'] > 1)} on {rows[0]['device']}"
    panels[0].set_title(f"decoding, {where}", loc="left", fontsize=10)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    plot_style.notes(drawn, [f"Greedy, token by token; medians of calls that took turns. Commit {commits}."])
    return {"decode": drawn}
