"""Model cards: what a stranger should know of a preset, as the README.md that a hub shows."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import keras
import yaml

from flash_tf.registry import mixer_name

FILE = "README.md"
UNKNOWN = "unknown"
USE = """```python
import flash_tf as ft

model = ft.load("PATH")  # this folder
```"""


def read_licence(folder: str) -> str:
    """The `license` in the front matter of a folder's model card; "unknown" if it says none."""
    path = Path(folder, FILE)
    text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        found = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        found = None
    found = found.get("license") if isinstance(found, dict) else None
    found = ", ".join(map(str, found)) if isinstance(found, list) else found
    return str(found) if found else UNKNOWN


def card(model: keras.Model, source: str, licence: str, about: Mapping[str, object], use: str = USE) -> str:
    """The text of a model card.

    Args:
      model: The model, built.
      source: What the weights come from, in a sentence.
      licence: The licence of the weights and of the data behind them.
      about: Further rows of the table, as the data and its metrics.
      use: How to load it.
    """
    count = sum(math.prod(variable.shape) for variable in model.weights)
    rows = {
        "model": type(model).__name__,
        "mixer": mixer_name(model.mixer),
        "parameters": f"{count:,}",
        "vocabulary": f"{model.vocabulary_size:,}",
        "tokenizer": "none: it takes token ids" if model.tokenizer is None else "in this folder",
        "licence": licence,
        **about,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    front = f"---\nlicense: {json.dumps(licence, ensure_ascii=False)}\nlibrary_name: keras\ntags: [flash-tf]\n---\n"
    return f"{front}\n{source}\n\n| | |\n|---|---|\n{table}\n\n{use}\n"
