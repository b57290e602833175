"""All layers of a model at work: one picture and one table, from the summaries of `flash_tf.pictures.inspection`."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flash_tf.pictures import style
from flash_tf.pictures.measures import RATIOS

DEAD = "#000000"
NEAR = 0  # the ratio in the table, of RATIOS


def overview(summaries: Sequence[dict], sums_of_rows: Sequence[np.ndarray], text: str) -> Figure:
    """All layers: the first part's row sums, dead rows and accumulated scores; shares, if there are several parts.

    Args:
      summaries: One for each layer.
      sums_of_rows: The row sums of each layer's first part.
      text: The text that the model read.
    """
    layers, parts = [one["layer"] for one in summaries], _names(summaries)
    first = [one["parts"][first_part(one)] for one in summaries]
    named = " or ".join(dict.fromkeys(map(first_part, summaries)))
    drawn, cells = style.figure(2, 2, 6.8)
    style.title(drawn, "All layers")
    drawn.supxlabel(
        style.literal(f"text: {style.shortened(' '.join(text.split()), 120)}"), fontsize=8, color=style.GREY
    )
    sums, silent, scores, left = cells.flat
    if len(parts) > 1:
        _shares_of_layers(left, layers, parts, summaries)
    else:
        left.remove()
    _accumulated_of_layers(scores, first, layers)
    scores.set_title(f"{named}: accumulated score", fontsize=9, loc="left")
    _row_sums_of_layers(sums, layers, sums_of_rows)
    sums.set_title(f"{named}: sums of rows, median and 10 to 90%", fontsize=9, loc="left")
    sums.set_ylabel("sum of a query's weights", fontsize=8)
    shares = [part["dead_rows"] for part in first]
    silent.bar(layers, shares, color=DEAD)
    silent.set_ylim(0, max(0.05, silent.get_ylim()[1]))
    silent.yaxis.set_major_formatter(PercentFormatter(1))
    silent.set_title(f"{named}: dead rows", fontsize=9, loc="left")
    silent.set_ylabel("share of the queries", fontsize=8)
    if not any(shares):
        silent.text(0.5, 0.5, "none", transform=silent.transAxes, ha="center", color=style.GREY)
    for axes in (sums, silent, left):
        axes.set_xlabel("layer")
        axes.set_xlim(min(layers) - 0.6, max(layers) + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    return drawn


def _names(summaries):
    """The names of all parts of all layers."""
    return list(dict.fromkeys(name for one in summaries for name in one["parts"]))


def first_part(summary: dict) -> str:
    """The name of a layer's first part."""
    return next(iter(summary["parts"]))


def _shares_of_layers(axes, layers, parts, summaries):
    bottom = np.zeros(len(layers))
    for part, colour in zip(parts, style.COLOURS, strict=False):
        share = np.array([one["parts"].get(part, {"share": 0.0})["share"] for one in summaries])
        axes.bar(layers, share, bottom=bottom, color=colour, label=part)
        bottom += share
    share_axis(axes)


def _accumulated_of_layers(axes, parts, layers):
    """A line for each layer that has weights, from dark for the first to light for the last."""
    axes.plot((0, 1), (0, 1), color=style.GREY, linestyle=":", linewidth=1, label="all tokens alike")
    for i, part in enumerate(parts):
        if part["accumulated"] is not None:
            label = f"layer {layers[i]}" if i in (0, len(parts) - 1) else None
            colour = colormaps["viridis"](0.9 * i / max(1, len(parts) - 1))
            axes.plot(RATIOS, part["accumulated"], color=colour, linewidth=1.2, marker=".", ms=4, label=label)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("tokens around the query, of the text")
    axes.set_ylabel("share of the weights", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="lower right")


def _row_sums_of_layers(axes, layers, sums_of_rows):
    """On a logarithmic axis where layers differ much and no sum is negative.

    A layer whose row sums are all zero is a cross at the bottom.
    """
    low, middle, high = (np.array([np.quantile(one, q) for one in sums_of_rows]) for q in (0.1, 0.5, 0.9))
    alive, at = np.array([one.any() for one in sums_of_rows]), np.array(layers)
    lowest = low.min()  # negative where weights have signs
    ends = [(middle - low)[alive], (high - middle)[alive]]
    axes.errorbar(at[alive], middle[alive], ends, fmt="o", color=style.COLOURS[0], capsize=3)
    if alive.any() and lowest >= 0 and middle[alive].max() > 10 * middle[alive].min() > 0:
        style.logarithmic(axes)
    else:
        axes.set_ylim(bottom=min(0, lowest), top=None if alive.any() else 1)
    if not alive.all():
        look = {"color": DEAD, "ms": 7, "mew": 2, "clip_on": False}
        axes.plot(at[~alive], np.zeros(sum(~alive)), "x", **look, transform=axes.get_xaxis_transform())


def table(summaries: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """The figures of all layers: heading and rows."""
    parts, firsts = _names(summaries), list(dict.fromkeys(map(first_part, summaries)))
    spelt = lambda value, pattern: "-" if value is None else format(value, pattern)  # noqa: E731
    head, rows = ["layer"], [[str(one["layer"])] for one in summaries]
    columns = (("share", ".1%"), ("row_sum", ".2e"), ("dead_rows", ".1%"), ("distance", ".1f"))
    columns += (("within_10%", ".1%"),)
    for name, pattern in columns if len(parts) > 1 else columns[1:]:
        for part in parts if name in ("share", "distance") else firsts:
            head.append(f"{part} {name.replace('_', ' ')}" if len(parts) > 1 else name.replace("_", " "))
            for row, one in zip(rows, summaries, strict=True):
                row.append(spelt(_figure(one["parts"].get(part), name), pattern))
    head += ["output/input", "error"]
    for row, one in zip(rows, summaries, strict=True):
        row += [f"{one['output_over_input']:.2g}", f"{one['disagreement']:.0e}"]
    return head, rows


def _figure(part, name):
    """A figure of a part; None if the layer has no such part, or the part no such figure."""
    if part is None or name != "within_10%":
        return None if part is None else part[name]
    return None if part["accumulated"] is None else part["accumulated"][NEAR]


def share_axis(axes: Axes) -> None:
    """Sets axes up for parts of an output, which add up to 1."""
    axes.set_axisbelow(False)
    axes.grid(axis="y", color="white", linewidth=0.6, alpha=0.6)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title("parts of the output", fontsize=9, loc="left")
    axes.set_ylabel("share of the output", fontsize=8)
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0.2)
