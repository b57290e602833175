"""Look into a language model: what its mixers do with a text, layer by layer, in pictures and figures.

`look` runs the model and takes each mixer's weights, `layer_figure` and `overview` draw them, `read` makes the report.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from flash_tf.pictures import attention_maps, page, style
from flash_tf.pictures.attention_maps import Part
from flash_tf.pictures.formulas import array, bias_of
from flash_tf.pictures.measures import accumulated, dead, distance, row_sums
from flash_tf.pictures.overview import DEAD, first_part, overview, share_axis, table
from flash_tf.registry import mixer_name

LONGEST = 1024  # tokens: the maps of more would take gigabytes, and nobody can read them
HEADS = 12  # maps of single heads at most, six in a row
LABELS, FEW = 40, 32  # tokens that a map may name; tokens that it names of a longer text
UNSEEN = "#DDDDDD"
# Inches: a map; rows that hold a title and maps, further maps, maps of single heads, lines.
MAP, MAP_ROW, NEXT_ROW, STRIP_ROW, LINES_ROW = 3.05, 5.0, 4.15, 1.8, 2.4
COLUMN = 4.85  # from a map to the next
CAPTION = (
    "Rows are queries, columns are keys. Grey: tokens that the query does not see. The colour is linear in the weight."
)
NOTES = (
    "Weights are computed again from the model's weights, in float64 NumPy, from the model's own input of each mixer. "
    "`error` compares the sum of the parts with the layer's own output (relative root mean square). "
    "Share: the length of a part's contribution to a token's output over the sum of all parts' lengths, as a mean over "
    "tokens, without the output's bias. Row sum: the sum of a query's weights, as a median over queries and heads. "
    "Dead rows: queries that see tokens and give all of them the weight zero, as relu² can. Distance: tokens between "
    "query and key, weighted by the absolute weights. Accumulated score: the share of a query's absolute weights that "
    "lies on a neighbourhood, as a mean over queries and heads; `within 10%` is the score on the tenth of the text "
    "around the query (TransNormer, section 3.2). Output/input: root mean square of the mixer's output over the "
    "root mean square of the stream that it is added to."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A mixer at work.

    Attributes:
      index: Number of the mixer, from 0.
      parts: The terms of its output.
      strength: Root mean square of its output over the root mean square of the residual stream.
      disagreement: Relative root-mean-square error of the parts' sum against the layer's own output. It says how far
        to trust the maps: about 1e-7 in float32, 1e-2 in bfloat16.
    """

    index: int
    parts: list[Part]
    strength: float
    disagreement: float

    def shares(self) -> np.ndarray:
        """Each part's share of the output of each token, `[parts, n]`: its length over the sum of the lengths."""
        lengths = np.stack([np.linalg.norm(part.output, axis=-1) for part in self.parts])
        total = lengths.sum(axis=0)
        return lengths / np.where(total > 0, total, 1)


def encode(tokenizer, text: str, *, masks: bool, longest: int) -> tuple[np.ndarray, int]:
    """The first ids of a text, at most `longest` and `LONGEST`, and the number of all its ids.

    Args:
      tokenizer: The model's.
      text: The text.
      masks: Whether `<mask>` in it is a mask, as it is for masked models.
      longest: The longest sequence that the model was trained on.

    Raises:
      ValueError: When it has no token.
    """
    ids = tokenizer.encode_with_masks(text) if masks else tokenizer.encode([text])[0]
    if not len(ids):
        raise ValueError(f"the text needs a token or more, got none of {text!r}")
    return ids[: min(longest, LONGEST)], len(ids)


def look(model: keras.Model, ids: np.ndarray, layers: Collection[int] = ()) -> Iterator[Layer]:
    """Runs a text through a model, and yields each of its mixers at work.

    A mixer's input is the model's own, in the model's precision. Everything after it is float64.

    Args:
      model: A built language model.
      ids: The text, `[n]`.
      layers: The mixers wanted, from 0; none for all.

    Raises:
      ValueError: When the model's mixer has no maps, it has no such layer, or its weights are no numbers.
    """
    parts_of = [attention_maps.of(kind["type"]) for kind in model.kinds]
    if wrong := [i for i in layers if not 0 <= i < model.depth]:
        raise ValueError(f"the model has layers 0 to {model.depth - 1}, got {wrong[0]}")
    positions = keras.ops.arange(len(ids), dtype="int32")[None]
    x, mixers = model.embed(keras.ops.convert_to_tensor(ids[None], "int32"), positions), model.mixers
    for block in model.blocks:
        index = next((i for i, mixer in enumerate(mixers) if mixer is block.inner), None)
        if index is not None and (not layers or index in layers):
            seen = x if block.post_norm else block.norm(x)  # as in the block's call
            yield _layer(index, parts_of[index], block.inner, array(seen[0]), block.inner(seen, positions=positions), x)
        x = block(x, positions=positions)


def _layer(index, parts_of, mixer, seen, output, residual):
    output, residual = array(output[0]), array(residual[0])
    if not (np.isfinite(output).all() and np.isfinite(seen).all()):
        raise ValueError(f"layer {index} puts out what is not a number: the weights are of a run that diverged")
    parts = parts_of(mixer, seen)
    leaving = getattr(mixer, "out_projection", None)
    total = sum(part.output for part in parts) + (0 if leaving is None else bias_of(leaving))
    return Layer(
        index=index,
        parts=parts,
        strength=_over(output, residual),
        disagreement=_over(total - output, output),
    )


def _over(a, b):
    return float(np.linalg.norm(a) / max(np.linalg.norm(b), 1e-30))


def summary(layer: Layer) -> dict:
    """A layer in figures, for each part and as a whole; see `NOTES`."""
    means = layer.shares().mean(axis=1)
    return {
        "layer": layer.index,
        "parts": {
            part.name: {
                "share": float(share),
                "row_sum": float(np.median(row_sums(part))),
                "dead_rows": float(dead(part).mean()),
                "distance": distance(part),
                "accumulated": accumulated(part),
            }
            for part, share in zip(layer.parts, means, strict=True)
        },
        "output_over_input": layer.strength,
        "disagreement": layer.disagreement,
    }


class Window(NamedTuple):
    """The tokens that a map names.

    Attributes:
      start: The first.
      labels: Their names.
    """

    start: int
    labels: Sequence[str]

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + len(self.labels))


def window(pieces: Sequence[str], ids: Sequence[int], start: int, tokens: int | None) -> Window:
    """Tokens `start` to `start + tokens` of a text, up to its end; None for as many as a map can name.

    Raises:
      ValueError: When there is no token, or too many to name.
    """
    if tokens is None:
        tokens = LABELS if len(ids) <= LABELS else FEW
    if not 1 <= tokens <= LABELS:
        raise ValueError(f"--tokens must be between 1 and {LABELS}, which a map can name, got {tokens}")
    if not 0 <= start < len(ids):
        raise ValueError(f"--start must be between 0 and the text's last token, {len(ids) - 1}, got {start}")
    chosen = slice(start, start + tokens)
    return Window(start, [style.token_label(p, i) for p, i in zip(pieces[chosen], ids[chosen], strict=True)])


def layer_figure(layer: Layer, named: Window, text: str) -> Figure:
    """A layer: its maps with the tokens of the window, maps of the whole text if it is longer, and lines."""
    n, heads, parts = len(layer.parts[0].seen), len(layer.parts[0].weights), layer.parts
    panels = [(part, named) for part in parts] + [(part, None) for part in parts if n > len(named.labels)]
    strips = -(-min(heads, HEADS) // 6) if heads > 1 else 0
    rows, alone = -(-len(panels) // 2), len(panels) == 1
    maps = MAP_ROW + NEXT_ROW * (rows - 1)
    height = maps + STRIP_ROW * strips + (0 if alone else LINES_ROW)
    drawn = Figure(figsize=(style.WIDTH, height), dpi=150, facecolor="white")
    _title(drawn, f"Layer {layer.index}", text)
    for i, (part, chosen) in enumerate(panels):
        _map(drawn, 1.1 + COLUMN * (i % 2), 0.75 + NEXT_ROW * (i // 2), part, chosen)
    if strips:
        _heads(drawn, maps, parts[0], named)
    if alone:
        _row_sums(_axes(drawn, 6.2, 0.75, 3.6, MAP), parts[0])
        return drawn
    top, wide = height - LINES_ROW + 0.4, len(parts) == 1
    _row_sums(_axes(drawn, 0.8, top, 9.0 if wide else 4.0, 1.5), parts[0])
    if not wide:
        _shares(_axes(drawn, 5.8, top, 4.0, 1.5), layer)
    return drawn


def _title(drawn, heading, text):
    height = drawn.get_size_inches()[1]
    shown = style.literal(style.shortened(" ".join(text.split()), 120))
    left = 0.1 / style.WIDTH
    drawn.text(left, 1 - 0.12 / height, heading, fontsize=11, va="top", fontweight="bold")
    drawn.text(left, 1 - 0.34 / height, f"text: {shown}", fontsize=8, va="top", color=style.GREY)


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
        _scale(figure, image, left + MAP + 0.08, top + 0.4, MAP - 0.8)
    else:
        said = "all weights are zero" if seen.any() else "these queries see none of these tokens"
        axes.text(0.5, 0.5, said, transform=axes.transAxes, ha="center", color=style.GREY)
    over = f", mean of {heads} heads" if heads > 1 else ""
    where = "the whole text" if named is None else f"tokens {first} to {first + len(named.labels) - 1}"
    axes.set_title(f"{part.name}{over}: {where}", fontsize=9, loc="left")
    unit = "token number" if named is None else "token"
    axes.set_xlabel(f"key ({unit})", fontsize=8)
    axes.set_ylabel(f"query ({unit})", fontsize=8)
    if named is not None:
        at, size = range(first, first + len(named.labels)), min(7, 0.9 * 72 * MAP / len(named.labels))
        axes.set_xticks(at, named.labels, rotation=90, fontsize=size)
        axes.set_yticks(at, named.labels, fontsize=size)
        axes.tick_params(length=0, pad=3)


def _scale(figure, image, left, top, height):
    """The scale of colours of a map."""
    bar = figure.colorbar(image, cax=_axes(figure, left, top, 0.12, height))
    bar.locator, bar.formatter = MaxNLocator(5), FuncFormatter(lambda x, _: f"{x:.3g}")
    bar.update_ticks()
    bar.set_label("attention weight", fontsize=8, labelpad=2)


def _norm(weights, signed):
    """A linear scale from zero, or around zero where weights may be negative."""
    top = float(np.abs(weights).max()) or 1.0
    return Normalize(-top if signed else 0, top)


def _image(axes, weights, seen, norm, first=0):
    axes.set_facecolor(UNSEEN)
    last = first + len(weights) - 0.5
    shown = np.ma.masked_where(~seen, weights)
    colours = "PuOr_r" if norm.vmin < 0 else "Blues"
    box = (first - 0.5, last, last, first - 0.5)
    return axes.imshow(shown, cmap=colours, norm=norm, extent=box, interpolation="nearest", interpolation_stage="data")


def _heads(figure, top, part, named):
    """A small map of each head, all on one scale."""
    shown = part.weights[:HEADS, named.slice, named.slice]
    norm = _norm(shown, signed=(part.weights < 0).any())
    for i, weights in enumerate(shown):
        axes = _axes(figure, 0.25 + 1.5 * (i % 6), top + STRIP_ROW * (i // 6) + 0.2, 1.4, 1.4)
        image = _image(axes, weights, part.seen[named.slice, named.slice], norm)
        axes.set_xticks([])
        axes.set_yticks([])
        more = f" of {len(part.weights)}" if i == len(shown) - 1 < len(part.weights) - 1 else ""
        axes.set_title(f"head {i}{more}", fontsize=7, pad=2)
    if shown.any():
        _scale(figure, image, 0.25 + 1.5 * min(len(shown), 6), top + 0.2, 1.4)


def _by_query(axes, n):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=style.LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(-0.5, n - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("query (token number)", fontsize=8)


def _row_sums(axes, part):
    sums, silent = row_sums(part), dead(part)
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
    axes.set_title(f"{part.name}: sums of rows{heads}, {silent.mean():.1%} dead", fontsize=9, loc="left")
    axes.set_ylabel("sum of a query's weights", fontsize=8)


def _shares(axes, layer):
    shares = layer.shares()
    _by_query(axes, shares.shape[1])
    edges = np.repeat(np.arange(shares.shape[1] + 1) - 0.5, 2)[1:-1]
    names, colours = [part.name for part in layer.parts], style.COLOURS[: len(shares)]
    axes.stackplot(edges, np.repeat(shares, 2, axis=1), labels=names, colors=colours)
    share_axis(axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `flash-tf inspect`.

    Attributes:
      mixer: The mixer's name in configs.
      pieces: The text's tokens.
      summaries: One for each layer, see `summary`.
      pictures: The overview, then a picture for each layer.
      notes: Lines on omissions and on striking layers.
    """

    mixer: str
    pieces: list[str]
    summaries: list[dict]
    pictures: list[page.Picture]
    notes: list[str]

    def text(self) -> str:
        """For a terminal."""
        return "\n".join([page.as_text(*table(self.summaries)), *self.notes])

    def as_dict(self) -> dict:
        return {"mixer": self.mixer, "tokens": self.pieces, "layers": self.summaries, "notes": self.notes}

    def html(self, model: str) -> str:
        """The page about a model with that name."""
        facts = {"Model": model, "Mixer": self.mixer, "Tokens": f"{len(self.pieces):,}: {' '.join(self.pieces)}"}
        facts |= {"Note": " ".join(self.notes)} if self.notes else {}
        tables = [page.Table("Layers", *table(self.summaries))]
        return page.html("Attention maps", facts, tables, self.pictures, NOTES)


def read(
    model: keras.Model,
    tokenizer,
    text: str,
    *,
    longest: int,
    start: int = 0,
    tokens: int | None = None,
    layers: Collection[int] = (),
) -> Report:
    """Runs a text through a model, and draws its mixers at work.

    Args:
      model: A built language model.
      tokenizer: The model's.
      text: The text.
      longest: The longest sequence that the model was trained on.
      start: The first token on the axes.
      tokens: Tokens on the axes; None for as many as a map can name.
      layers: The layers wanted, from 0; none for all.

    Raises:
      ValueError: See `encode`, `look` and `window`.
    """
    ids, total = encode(tokenizer, text, masks=not model.causal, longest=longest)
    pieces = [tokenizer.piece(int(id)) for id in ids]
    named = window(pieces, ids.tolist(), start, tokens)
    summaries, sums, pictures, blind = [], [], [], []
    for layer in look(model, ids, layers):
        summaries.append(summary(layer))
        sums.append(row_sums(layer.parts[0]))
        blind += [part.name for part in layer.parts if not part.seen.any()]
        drawn = layer_figure(layer, named, text)
        pictures.append(page.picture(f"inspect_layer_{layer.index:02d}", f"Layer {layer.index}", CAPTION, drawn))
    first = page.picture("inspect_overview", "All layers", "", overview(summaries, sums, text))
    return Report(
        mixer=mixer_name(model.mixer),
        pieces=pieces,
        summaries=summaries,
        pictures=[first, *pictures],
        notes=_notes(len(ids), total, named, blind, summaries),
    )


def _notes(read, total, named, blind, summaries):
    notes = []
    if read < total:
        why = "the most that can be drawn" if read == LONGEST else "the length of the model's training texts"
        notes.append(f"The text has {total:,} tokens; the first {read:,} were read, {why}.")
    if len(named.labels) < read:
        last = named.start + len(named.labels) - 1
        notes.append(f"Maps name tokens {named.start} to {last} of {read:,}; --start and --tokens choose others.")
    if blind:
        notes.append(f"The {blind[0]} part sees nothing in so short a text: it reads the chunks before a token's own.")
    for first in dict.fromkeys(map(first_part, summaries)):
        own = [one for one in summaries if first_part(one) == first]
        if all_dead := [str(one["layer"]) for one in own if one["parts"][first]["dead_rows"] == 1]:
            what = first if first == "attention" else f"{first} attention"
            notes.append(f"All weights are zero: {what} of layer {', '.join(all_dead)}.")
    return notes
