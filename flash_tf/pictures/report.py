"""The report on a model and a text: pictures of its layers, their figures, and what was left out."""

import dataclasses
from collections.abc import Collection

import keras

from flash_tf.pictures import attention, inspection, page
from flash_tf.registry import mixer_name

CAPTION = (
    "Grey: tokens that the query does not see. Blue maps are coloured by the root of a weight, others by the weight."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `flash-tf inspect` says.

    Attributes:
      mixer: As configs call it.
      pieces: The text's tokens.
      summaries: Of each layer, see `inspection.summary`.
      pictures: The overview, then a picture a layer.
      notes: What was left out, and what stands out; a line each.
    """

    mixer: str
    pieces: list[str]
    summaries: list[dict]
    pictures: list[page.Picture]
    notes: list[str]

    def text(self) -> str:
        """For a terminal."""
        return "\n".join([page.as_text(*attention.table(self.summaries)), *self.notes])

    def as_dict(self) -> dict:
        return {"mixer": self.mixer, "tokens": self.pieces, "layers": self.summaries, "notes": self.notes}

    def html(self, model: str) -> str:
        """The page, `model` being what was read."""
        facts = {"Model": model, "Mixer": self.mixer, "Tokens": f"{len(self.pieces):,}: {' '.join(self.pieces)}"}
        facts |= {"Note": " ".join(self.notes)} if self.notes else {}
        tables = [page.Table("Layers", *attention.table(self.summaries))]
        return page.html("What the model looks at", facts, tables, self.pictures, attention.NOTES)


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
    """Runs a text through a model, and draws what its mixers do.

    Args:
      model: A built language model.
      tokenizer: The model's.
      text: The text.
      longest: The longest sequence that the model was trained on.
      start: The first token that maps name.
      tokens: How many they name; None for as many as can be read.
      layers: The layers wanted, from 0; none for all.

    Raises:
      ValueError: See `inspection.encode`, `inspection.look` and `attention.window`.
    """
    ids, total = inspection.encode(tokenizer, text, masks=not model.causal, longest=longest)
    pieces = [tokenizer.piece(int(id)) for id in ids]
    named = attention.window(pieces, ids.tolist(), start, tokens)
    summaries, sums, pictures, blind = [], [], [], []
    for layer in inspection.look(model, ids, layers):
        summaries.append(inspection.summary(layer))
        sums.append(inspection.row_sums(layer.parts[0]))
        blind = [part.name for part in layer.parts if not part.seen.any()]
        drawn = attention.layer_figure(layer, named)
        pictures.append(page.picture(f"inspect_layer_{layer.index:02d}", f"Layer {layer.index}", CAPTION, drawn))
    overview = page.picture("inspect_overview", "All layers", "", attention.overview(summaries, sums))
    return Report(
        mixer=mixer_name(model.mixer),
        pieces=pieces,
        summaries=summaries,
        pictures=[overview, *pictures],
        notes=_notes(len(ids), total, named, blind, summaries),
    )


def _notes(read, total, named, blind, summaries):
    notes = []
    if read < total:
        why = "no more can be drawn" if read == inspection.LONGEST else "the length of the model's training texts"
        notes.append(f"The text has {total:,} tokens; the first {read:,} were read, {why}.")
    if len(named.labels) < read:
        last = named.start + len(named.labels) - 1
        notes.append(f"Maps name tokens {named.start} to {last} of {read:,}; --start and --tokens choose others.")
    if blind:
        notes.append(f"The {blind[0]} part sees nothing in so short a text: it reads the chunks before a token's own.")
    first = next(iter(summaries[0]["parts"]))
    if all_dead := [str(one["layer"]) for one in summaries if one["parts"][first]["dead_rows"] == 1]:
        notes.append(f"Dead, every weight of every query being zero: {first} attention of layer {', '.join(all_dead)}.")
    return notes
