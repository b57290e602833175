"""What `flash-tf convert` does: reads a model of any kind, and writes it as a preset or as a public folder."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from flash_tf import loading, owned_files, presets
from flash_tf.converting import card
from flash_tf.converting import convert as converter
from flash_tf.converting.tensor_file import CONFIG, read_config
from flash_tf.models.language_model import LanguageModel
from flash_tf.training import restore, run_directory

KEPT = "public_config.json"  # of a preset: the config that its model was made from


class Source(NamedTuple):
    """A model, and what there is to know of it.

    Attributes:
      model: The model with its tokenizer.
      public: The public config that it was made from; empty if there is none.
      about: Rows of the model card: the data and the metrics of a run.
    """

    model: LanguageModel
    public: Mapping[str, object]
    about: Mapping[str, object]


def convert(
    source: str, out: str, to: str, licence: str | None, report: Callable[[str], None]
) -> dict[str, str | bool]:
    """Converts a model.

    Args:
      source: A public folder, a preset or a run.
      out: The new folder.
      to: "preset" or "safetensors".
      licence: For the model card; None for what the card of `source` says.
      report: Called with a line for what the new folder lacks.

    Returns:
      `out`; `model`, the class that reads it; `library`, where that class is; `licence`; and `tokenizer`, whether there
      is one.

    Raises:
      ValueError: There is no such model, or it cannot be converted. Nothing was written.
    """
    owned_files.local(out, "flash-tf convert")  # before the work
    found = _read(source, report)
    family = converter.family_of(found.model)[1] if to == "safetensors" else None
    licence = licence or card.read_licence(source)
    if licence == card.UNKNOWN:
        report(f"the licence is unknown: {source} has no {card.FILE} that says it; give --licence for the model card")
    if found.model.tokenizer is None:
        report(f"{out} gets weights alone: {source} has no tokenizer that is read here")
    about = {"licence": licence, "tokenizer": found.model.tokenizer is not None}
    origin = f"Weights of {Path(source).resolve().name}, converted by `flash-tf convert`."
    if family is not None:
        use = f"`{family.ARCHITECTURE}` of `{family.LIBRARY}` reads this folder."
        files = {card.FILE: card.card(found.model, origin, licence, found.about, use)}
        converter.save_public(found.model, out, found.public, files)
        return {"out": out, "model": family.ARCHITECTURE, "library": family.LIBRARY, **about}
    files = {card.FILE: card.card(found.model, origin, licence, found.about)}
    files |= {KEPT: json.dumps(found.public, indent=2) + "\n"} if found.public else {}
    presets.save(found.model, out, files)
    return {"out": out, "model": type(found.model).__name__, "library": "flash-tf", **about}


def _read(source, report):
    if Path(source, run_directory.CONFIG).is_file():
        trained = restore.restore(source, report)
        return Source(trained.model, {}, _about(trained, Path(source, run_directory.EVALUATIONS)))
    if not Path(source, CONFIG).is_file():
        raise ValueError(f"{source} has no {CONFIG}: convert needs a public model, a preset or a run")
    if converter.is_public(source):
        return Source(converter.from_public(source), read_config(source), {})
    return Source(loading.load(source), owned_files.json_of(f"{source}/{KEPT}"), {})


def _record(line):
    """The record in a line; an empty one if the process died while it wrote the line."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _about(trained, evaluations):
    """Rows of the model card: the data, the step, and what the evaluation at that step says."""
    lines = evaluations.read_text("utf-8", "replace").splitlines() if evaluations.is_file() else []
    at_step = [row for row in map(_record, lines) if row.get("step") == trained.step]
    metrics = {f"validation {name.replace('_', ' ')}": value for name, value in (at_step or [{}])[-1].items()}
    data = trained.config.data
    return {
        "data": f"`{json.dumps(data.source)}`",
        "sequence length": f"{data.sequence_length:,}",
        "steps": f"{trained.step:,}",
        **{name: f"{value:,.4f}" for name, value in metrics.items() if isinstance(value, float)},
    }
