"""What `flash-tf convert` does: reads a model of any kind, and writes it as a preset or as a public folder."""

import json
from collections.abc import Callable
from pathlib import Path

from flash_tf import loading, owned_files, presets
from flash_tf.converting import card
from flash_tf.converting import convert as converter
from flash_tf.converting.tensor_file import CONFIG, read_config

KEPT = "public_config.json"  # of a preset: the config that its model was made from


def convert(source: str, out: str, to: str, licence: str | None, report: Callable[[str], None]) -> str:
    """Converts a model, and says in a line what is where.

    Args:
      source: A public folder, a preset or a run.
      out: The new folder.
      to: "preset" or "safetensors".
      licence: For the model card; None for what the card of `source` says.
      report: Called with a line for what the new folder lacks.

    Raises:
      ValueError: There is no such model, or it cannot be converted. Nothing was written.
    """
    if not Path(source, CONFIG).is_file() and not Path(source, "config.yaml").is_file():
        raise ValueError(f"{source} has no {CONFIG}: convert needs a public model, a preset or a run")
    owned_files.local(out, "flash-tf convert")  # before the work
    public = converter.is_public(source)
    model = converter.from_public(source) if public else loading.load(source)
    kept = read_config(source) if public else owned_files.json_of(f"{source}/{KEPT}")
    family = converter.family_of(model)[1] if to == "safetensors" else None
    licence = licence or card.read_licence(source)
    if licence == card.UNKNOWN:
        report(f"the licence is unknown: {source}/{card.FILE} says none; give --licence for the model card")
    if model.tokenizer is None:
        report(f"{out} gets weights alone: {source} has no tokenizer that is read here")
    origin = f"Weights of {Path(source).resolve().name}, converted by `flash-tf convert`."
    if family is not None:
        use = f"`{family.ARCHITECTURE}` of `{family.LIBRARY}` reads this folder."
        converter.save_public(model, out, kept, {card.FILE: card.card(model, origin, licence, {}, use)})
        return f"weights for {family.ARCHITECTURE} of {family.LIBRARY} are in {out}"
    files = {card.FILE: card.card(model, origin, licence, {})}
    files |= {KEPT: json.dumps(kept, indent=2) + "\n"} if kept else {}
    presets.save(model, out, files)
    return f"a preset of {type(model).__name__} is in {out}"
