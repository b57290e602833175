"""How all plots look: a colour for each model, labels beside lines, an axis of context lengths."""

import itertools
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# Model -> label and colour. The palette is Okabe and Ito's, which people of every colour vision can tell apart.
MODELS = {
    "flash": ("FLASH", "#0072B2"),
    "flash_quad": ("FLASH-Quad", "#D55E00"),
    "transformer": ("Transformer", "#56B4E9"),
    "transformer_plus": ("Transformer+", "#E69F00"),
    "transformer_plus_plus": ("Transformer++", "#000000"),
    "gla": ("GLA", "#CC79A7"),
}
OTHERS = ("#009E73", "#999999", "#F0E442", *(color for _, color in MODELS.values()))  # of more than three, also models'
GREY = "#666666"
GAP = 0.055  # between labels of size 9, as a part of the axes' height
FITTING = 9 / GAP  # labels x their size, in points, that the axes' height has room for


def look(model: str, others: Sequence[str] = ()) -> tuple[str, str]:
    """Label and colour of a model. `others` lists the models without a colour of their own: each gets the next one."""
    if model in MODELS:
        return MODELS[model]
    return model, OTHERS[list(others).index(model) % len(OTHERS)]


def short(n: float) -> str:
    """A context length in short: 512, 1k, 32k."""
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


def figure(title: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with a title, two panels side by side, and room for labels right of each panel and for notes below."""
    columns, rows = min(panels, 2), -(-panels // 2)
    drawn = Figure(figsize=(8.0 * columns, 4.5 * rows), dpi=150, facecolor="white")
    places = [(i % columns, rows - 1 - i // columns) for i in range(panels)]
    axes = [drawn.add_axes(((x + 0.09) / columns, (y + 0.2) / rows, 0.64 / columns, 0.7 / rows)) for x, y in places]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        one.set_axisbelow(True)
    axes[0].set_title(title, loc="left", fontsize=10)
    return drawn, axes


def lengths_on_x(axes: Axes, lengths: Sequence[int]) -> None:
    """Makes the x axis logarithmic, with a tick at each measured length."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: short(n)))
    axes.set_xlabel("context length (tokens)")


def notes(drawn: Figure, lines: Sequence[str]) -> None:
    """Small print below the axes, which fits the figure's width."""
    fitting = [part for line in lines for part in textwrap.wrap(line, int(16.5 * drawn.get_figwidth()))]
    drawn.text(0.02, 0.0675 / drawn.get_figheight(), "\n".join(fitting), fontsize=7, color=GREY, va="bottom")


def label_lines(axes: Axes, size: float = 9.0) -> None:
    """Writes each line's label at the right of the axes, near the height of its end, without overlaps.

    Labels stay between the bottom and the top of the axes, unless they are too many for their size: then the top holds.

    Args:
      axes: The lines' axes.
      size: Of the labels, in points.
    """
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    ends = {
        line: axes.transAxes.inverted().transform(axes.transData.transform(line.get_xydata()[-1])) for line in lines
    }
    lines.sort(key=lambda line: ends[line][1])
    gap = GAP * size / 9
    heights = apart([ends[line][1] for line in lines], gap)
    highest = [1 - i * gap for i in reversed(range(len(lines)))]
    heights = [min(max(height, i * gap), highest[i]) for i, height in enumerate(heights)]
    for line, height in zip(lines, heights, strict=True):
        axes.annotate(
            line.get_label(),
            xy=tuple(ends[line]),
            xycoords="axes fraction",
            xytext=(1.04, height),
            textcoords="axes fraction",
            color=line.get_color(),
            fontsize=size,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "lw": 0.7,
                "ls": ":",
                "shrinkB": 4,
                "relpos": (0, 0.5),  # from the label's beginning: from its middle, the line would strike it through
            },
            annotation_clip=False,
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Moves ascending heights as little as possible, so that neighbours are at least `gap` apart.

    Heights that collide become a group, centred at their mean.
    """
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _top(groups[-2], gap) + gap > _bottom(groups[-1], gap):
            last = groups.pop()
            groups[-1] += last
    placed = ([_bottom(group, gap) + i * gap for i in range(len(group))] for group in groups)
    return list(itertools.chain.from_iterable(placed))


def _bottom(group, gap):
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group, gap):
    return sum(group) / len(group) + gap * (len(group) - 1) / 2
