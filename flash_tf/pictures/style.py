"""The look of pictures: colours for every colour vision, values at the ends of curves, legends outside the axes."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")  # Okabe and Ito's, less yellow
DASHES = ("-", "--", ":", "-.")  # for more lines than colours
GREY, LIGHT = "#666666", "#DDDDDD"
WIDTH = 10.0  # inches
LETTERS = 150  # that fit side by side in a legend of that width
APART = 10.5  # points between two values at the ends of curves


class End(NamedTuple):
    """A value to write at the end of a curve."""

    axes: Axes
    x: float
    y: float
    text: str
    colour: str


def figure(rows: int, columns: int, height: float) -> tuple[Figure, np.ndarray]:
    """A white page, `height` inches high, and its axes `[rows, columns]`. It needs no display."""
    drawn = Figure(figsize=(WIDTH, height), dpi=120, facecolor="white", layout="constrained")
    axes = drawn.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color=LIGHT, linewidth=0.8)
        one.set_axisbelow(True)
    return drawn, axes


def line_look(i: int) -> dict[str, str]:
    """Colour and dash of the i-th of several lines."""
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS) % len(DASHES)]}


def legend(drawn: Figure, handles: Sequence, labels: Sequence[str], note: str = "") -> None:
    """A legend below all axes, under a note. The page grows for it, so that nothing is cut off."""
    labels = [literal(shortened(label, LETTERS - 10)) for label in labels]
    columns = min(len(labels), max(1, LETTERS // (max(map(len, labels)) + 8)))
    width, height = drawn.get_size_inches()
    drawn.set_size_inches(width, height + 0.22 * (-(-len(labels) // columns) + bool(note)))
    look = {"fontsize": 8, "title_fontsize": 8, "frameon": False}
    drawn.legend(handles, labels, loc="outside lower center", ncols=columns, title=note or None, **look)


def write_ends(drawn: Figure, ends: Sequence[End]) -> None:
    """Writes values at the ends of curves, moved apart where they would cover each other. Call it last."""
    drawn.draw_without_rendering()  # the layout decides where the ends are
    points = 72 / drawn.dpi
    taken: list[tuple[Axes, float, float]] = []
    for end in sorted(ends, key=lambda end: end.y):
        x, y = end.axes.transData.transform((end.x, end.y)) * points
        near = [place for axes, beside, place in taken if axes is end.axes and abs(beside - x) < 40]
        place = max([y, *(place + APART for place in near)])
        taken.append((end.axes, x, place))
        end.axes.annotate(
            end.text,
            (end.x, end.y),
            (5, place - y),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=end.colour,
            annotation_clip=False,
            bbox={"facecolor": "white", "alpha": 0.8, "pad": 0.6, "linewidth": 0},  # readable over other curves
        )


def literal(text: str) -> str:
    """Text that matplotlib shows as it is: no formula between dollars, no name hidden by its first letter."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def shortened(text: str, length: int) -> str:
    """Text of at most `length` letters, the middle left out."""
    head = (length - 1) // 2
    return text if len(text) <= length else f"{text[:head]}…{text[head + 1 - length :]}"


def token_label(piece: str, id: int) -> str:
    """A piece as an axis shows it: short, and by its number where the font lacks one of its letters."""
    drawable = piece and all(ord(letter) in _letters() for letter in piece)
    return literal(shortened(piece, 14) if drawable else f"#{id}")


@cache
def _letters() -> frozenset[int]:
    font = FT2Font(font_manager.findfont("DejaVu Sans"))  # matplotlib brings it
    return frozenset(font.get_charmap())


def logarithmic(axes: Axes) -> None:
    """A logarithmic y axis that says 20, not 2 x 10^1, and has a few ticks even over a short range."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    subs = (1, 1.2, 1.5, 2, 3, 4, 5, 7) if decades < 0.7 else (1, 2, 5) if decades < 3.5 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}" if 1e-3 <= y < 1e6 else f"{y:.0e}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def steps_on_x(axes: Axes) -> None:
    """An axis of whole steps from 0 on."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlim(left=0)
    axes.set_xlabel("training step")


def title(drawn: Figure, text: str) -> None:
    """The title of the page."""
    drawn.suptitle(literal(shortened(text, 110)), x=0.01, ha="left", fontsize=11, fontweight="bold")
