"""Pictures of mixers at work: attention maps, what each part of a layer adds, row sums, dead rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from flash_tf.pictures import inspection, style
from flash_tf.pictures.inspection import Layer

HEADS = 12  # maps of single heads at most, six a row
UNSEEN = "#DDDDDD"
DEAD = "#000000"  # the colour of no part
LABELS, FEW = 40, 32  # tokens that a map may name; that it names of a longer text
MAP, MAP_ROW, NEXT_ROW, STRIP_ROW, LINES_ROW = (
    3.25,
    4.75,
    4.05,
    1.8,
    2.3,
)  # inches: of a map, and of what stands in a row
COLUMN = 4.85  # from a map to the next
NOTES = (
    "Weights are computed again from the model's weights, in float64 NumPy, from what the model itself feeds each "
    "mixer; `error` is how far the parts' sum is from the layer's own output (relative root mean square). "
    "Share: the length of a part's contribution to a token's output over the sum of all parts' lengths, mean over "
    "tokens; the output's bias is left out. Row sum: of a query's weights, median over queries and heads. Dead rows: "
    "queries that take nothing of any token they see, because relu² is zero for all of them. Distance: tokens between "
    "query and key, weighted by the absolute weights. Output/input: root mean square of what the mixer adds over that "
    "of the stream it is added to."
)


class Window(NamedTuple):
    """The tokens that a map names.

    Attributes:
      start: The first.
      labels: What they are called.
    """

    start: int
    labels: Sequence[str]

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + len(self.labels))


def window(pieces: Sequence[str], ids: Sequence[int], start: int, tokens: int | None) -> Window:
    """Tokens `start` to `start + tokens` of a text, as far as it goes; None for as many as can be read.

    Raises:
      ValueError: When there is none, or are too many to read.
    """
    if tokens is None:
        tokens = LABELS if len(ids) <= LABELS else FEW
    if not 1 <= tokens <= LABELS:
        raise ValueError(f"--tokens must be between 1 and {LABELS}, which a map can name, got {tokens}")
    if not 0 <= start < len(ids):
        raise ValueError(f"--start must be between 0 and the text's last token, {len(ids) - 1}, got {start}")
    chosen = slice(start, start + tokens)
    return Window(start, [style.token_label(p, i) for p, i in zip(pieces[chosen], ids[chosen], strict=True)])


def layer_figure(layer: Layer, named: Window) -> Figure:
    """A layer: its maps with the tokens of the window, those of the whole text if it is longer, and lines."""
    n, heads, parts = len(layer.parts[0].seen), len(layer.parts[0].weights), layer.parts
    panels = [(part, named) for part in parts] + [(part, None) for part in parts if n > len(named.labels)]
    strips = -(-min(heads, HEADS) // 6) if heads > 1 else 0
    rows, alone = -(-len(panels) // 2), len(panels) == 1
    maps = MAP_ROW + NEXT_ROW * (rows - 1)
    height = maps + STRIP_ROW * strips + (0 if alone else LINES_ROW)
    drawn = Figure(figsize=(style.WIDTH, height), dpi=150, facecolor="white")
    drawn.text(0.1 / style.WIDTH, 1 - 0.15 / height, f"layer {layer.index}", fontsize=9, va="top", fontweight="bold")
    for i, (part, chosen) in enumerate(panels):
        _map(drawn, 1.1 + COLUMN * (i % 2), MAP_ROW * (i // 2) + 0.35, part, chosen)
    if strips:
        _heads(drawn, maps, parts[0], named)
    if alone:
        _row_sums(_axes(drawn, 5.9, 0.35, 3.9, MAP), parts[0])
        return drawn
    top, wide = height - LINES_ROW + 0.4, len(parts) == 1
    _row_sums(_axes(drawn, 0.8, top, 9.0 if wide else 4.0, 1.5), parts[0])
    if not wide:
        _shares(_axes(drawn, 5.8, top, 4.0, 1.5), layer)
    return drawn


def _axes(figure, left, top, width, height) -> Axes:
    """Axes at a place in inches from the page's upper left corner."""
    w, h = figure.get_size_inches()
    axes = figure.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))
    axes.tick_params(labelsize=7)
    return axes


def _map(figure, left, top, part, named):
    """Mean over heads: with named tokens, or of the whole text."""
    chosen = slice(None) if named is None else named.slice
    weights, seen = part.weights.mean(axis=0)[chosen, chosen], part.seen[chosen, chosen]
    first, heads = 0 if named is None else named.start, len(part.weights)
    axes = _axes(figure, left, top, MAP, MAP)
    image = _image(axes, weights, seen, _norm(weights, signed=(part.weights < 0).any()), first)
    if weights.any():
        bar = figure.colorbar(image, cax=_axes(figure, left + MAP + 0.08, top + 0.4, 0.12, MAP - 0.8))
        bar.locator, bar.formatter = MaxNLocator(5), FuncFormatter(lambda x, _: f"{x:.3g}")
        bar.update_ticks()
    else:
        said = "all weights are zero" if seen.any() else "these queries see none of these tokens"
        axes.text(0.5, 0.5, said, transform=axes.transAxes, ha="center", color=style.GREY)
    over = f", mean of {heads} heads" if heads > 1 else ""
    where = "the whole text" if named is None else f"tokens {first} to {first + len(named.labels) - 1}"
    axes.set_title(f"{part.name}{over}: {where}", fontsize=9, loc="left")
    axes.set_xlabel("key", fontsize=8)
    axes.set_ylabel("query", fontsize=8)
    if named is not None:
        at, size = range(first, first + len(named.labels)), min(7, 0.9 * 72 * MAP / len(named.labels))
        axes.set_xticks(at, named.labels, rotation=90, fontsize=size)
        axes.set_yticks(at, named.labels, fontsize=size)
        axes.tick_params(length=0, pad=3)


def _norm(weights, signed):
    """Weights that are never negative by their root, which shows the small ones; others around zero."""
    top = float(np.abs(weights).max()) or 1.0
    return Normalize(-top, top) if signed else PowerNorm(0.5, 0, top)


def _image(axes, weights, seen, norm, first=0):
    axes.set_facecolor(UNSEEN)
    last = first + len(weights) - 0.5
    shown = np.ma.masked_where(~seen, weights)
    colours = "PuOr_r" if norm.vmin < 0 else "Blues"
    box = (first - 0.5, last, last, first - 0.5)
    return axes.imshow(shown, cmap=colours, norm=norm, extent=box, interpolation="nearest", interpolation_stage="data")


def _heads(figure, top, part, named):
    """A small map of each head, on one scale."""
    shown = part.weights[:HEADS, named.slice, named.slice]
    norm = _norm(shown, signed=(part.weights < 0).any())
    for i, weights in enumerate(shown):
        axes = _axes(figure, 0.25 + 1.61 * (i % 6), top + STRIP_ROW * (i // 6) + 0.2, 1.5, 1.5)
        _image(axes, weights, part.seen[named.slice, named.slice], norm)
        axes.set_xticks([])
        axes.set_yticks([])
        more = f" of {len(part.weights)}" if i == len(shown) - 1 < len(part.weights) - 1 else ""
        axes.set_title(f"head {i}{more}", fontsize=7, pad=2)


def _by_query(axes, n):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=style.LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(-0.5, n - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("query", fontsize=8)


def _row_sums(axes, part):
    sums, silent = inspection.row_sums(part), inspection.dead(part)
    at = np.arange(sums.shape[1])
    _by_query(axes, len(at))
    if len(sums) > 1:
        axes.fill_between(at, sums.min(axis=0), sums.max(axis=0), color=style.COLOURS[0], alpha=0.2, linewidth=0)
    axes.plot(at, sums.mean(axis=0), color=style.COLOURS[0], linewidth=1.2, marker="." if len(at) < 80 else "")
    axes.set_ylim(bottom=min(0, sums.min()), top=None if sums.any() else 1)
    if silent.any():
        rows = at[silent.any(axis=0)]
        axes.plot(rows, np.zeros(len(rows)), "x", color=DEAD, ms=5, clip_on=False, label="dead")
        axes.legend(fontsize=7, frameon=False, loc="upper right")
    heads = " (mean and range of heads)" if len(sums) > 1 else ""
    axes.set_title(f"{part.name}: row sums{heads}; {silent.mean():.1%} dead", fontsize=9, loc="left")


def _shares(axes, layer):
    shares = layer.shares()
    _by_query(axes, shares.shape[1])
    edges = np.repeat(np.arange(shares.shape[1] + 1) - 0.5, 2)[1:-1]
    names, colours = [part.name for part in layer.parts], style.COLOURS[: len(shares)]
    axes.stackplot(edges, np.repeat(shares, 2, axis=1), labels=names, colors=colours)
    _share_axis(axes)


def _share_axis(axes):
    axes.set_axisbelow(False)
    axes.grid(axis="y", color="white", linewidth=0.6, alpha=0.6)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title("share of the output", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0.2)


def overview(summaries: Sequence[dict], row_sums: Sequence[np.ndarray]) -> Figure:
    """All layers: shares, if there are several parts, row sums of the first part, and its dead rows.

    Args:
      summaries: Of the layers.
      row_sums: Of the first part of each.
    """
    layers, parts = [one["layer"] for one in summaries], list(summaries[0]["parts"])
    drawn, cells = style.figure(1, 3 if len(parts) > 1 else 2, 3.2)
    *left, sums, dead = cells[0]
    if left:
        bottom = np.zeros(len(layers))
        for part, colour in zip(parts, style.COLOURS, strict=False):
            share = np.array([one["parts"][part]["share"] for one in summaries])
            left[0].bar(layers, share, bottom=bottom, color=colour, label=part)
            bottom += share
        _share_axis(left[0])
    _row_sums_of_layers(sums, layers, row_sums)
    sums.set_title(f"{parts[0]}: row sums, median and 10 to 90%", fontsize=9, loc="left")
    shares = [one["parts"][parts[0]]["dead_rows"] for one in summaries]
    dead.bar(layers, shares, color=DEAD)
    dead.set_ylim(0, max(0.05, dead.get_ylim()[1]))
    dead.yaxis.set_major_formatter(PercentFormatter(1))
    dead.set_title(f"{parts[0]}: dead rows", fontsize=9, loc="left")
    if not any(shares):
        dead.text(0.5, 0.5, "none", transform=dead.transAxes, ha="center", color=style.GREY)
    for axes in cells[0]:
        axes.set_xlabel("layer")
        axes.set_xlim(min(layers) - 0.6, max(layers) + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    return drawn


def _row_sums_of_layers(axes, layers, row_sums):
    """On a logarithmic axis where layers differ much; a layer without any weight is a cross at its foot."""
    low, middle, high = (np.array([np.quantile(one, q) for one in row_sums]) for q in (0.1, 0.5, 0.9))
    alive, at = middle > 0, np.array(layers)
    ends = [(middle - low)[alive], (high - middle)[alive]]
    axes.errorbar(at[alive], middle[alive], ends, fmt="o", color=style.COLOURS[0], capsize=3)
    if alive.any() and middle[alive].max() > 10 * middle[alive].min():
        style.logarithmic(axes)
    else:
        axes.set_ylim(bottom=0, top=None if alive.any() else 1)
    if not alive.all():
        look = {"color": DEAD, "ms": 7, "mew": 2, "clip_on": False}
        axes.plot(at[~alive], np.zeros(sum(~alive)), "x", **look, transform=axes.get_xaxis_transform())


def table(summaries: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """The figures of all layers: heading and rows."""
    parts = list(summaries[0]["parts"])
    spelt = lambda value, pattern: "-" if value is None else format(value, pattern)  # noqa: E731
    head, rows = ["layer"], [[str(one["layer"])] for one in summaries]
    columns = (("share", ".1%"), ("row_sum", ".2e"), ("dead_rows", ".1%"), ("distance", ".1f"))
    for name, pattern in columns if len(parts) > 1 else columns[1:]:
        for part in parts if name in ("share", "distance") else parts[:1]:
            head.append(f"{part} {name.replace('_', ' ')}" if len(parts) > 1 else name.replace("_", " "))
            for row, one in zip(rows, summaries, strict=True):
                row.append(spelt(one["parts"][part][name], pattern))
    head += ["output/input", "error"]
    for row, one in zip(rows, summaries, strict=True):
        row += [f"{one['output_over_input']:.2g}", f"{one['disagreement']:.0e}"]
    return head, rows
