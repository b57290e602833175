"""Lists every system of the package with its properties, without training it."""

import math

from flash_tf import config, model_stats
from flash_tf.training import modelling

FOLDERS = ("wikitext2_lm", "wikitext2_mlm")  # every system has a small config in one of them, or in both
LONG = 2**20  # tokens, so many that only the fastest growing term counts


def systems() -> list[dict]:
    """The systems in alphabetical order.

    Returns:
      For each system: `name`; `config`, its small config; `paper`, its source; `causal`, whether it has a causal form;
      `state`, the kind of its decoding state: "constant", "cache" (it grows with the text) or "none" (it does not
      decode); `complexity`, the growth of its forward FLOPs with the n tokens of a text, for example "n" or "n^2".
    """
    names = {}
    for folder in reversed(FOLDERS):  # the causal config counts if there are both
        for name in config.names():
            if name.startswith(f"{folder}/"):
                names[name.partition("/")[2]] = name
    return [_system(name, names[name]) for name in sorted(names)]


def _system(name, config_name):
    loaded = modelling.with_masking(config.load(config_name))
    with model_stats.without_weights():
        model = modelling.make_model(loaded)
    streams = model.causal and model.obstacle is None
    return {
        "name": name,
        "config": config_name,
        "paper": loaded.paper,
        "causal": model.causal,
        "state": "none" if not streams else "cache" if model.grows else "constant",
        "complexity": _power(model),
    }


def _power(model):
    short, long = (sum(mixer.flops(n) for mixer in model.mixers) for n in (LONG, 4 * LONG))
    power = round(math.log(long / short, 4), 1)
    return "n" if power == 1 else f"n^{power:g}"


def as_text(found: list[dict]) -> str:
    """The result of `systems` as a table for people."""
    rows = [("system", "causal", "state", "FLOPs", "config", "paper")]
    for one in found:
        causal = "yes" if one["causal"] else "no"
        rows.append((one["name"], causal, one["state"], one["complexity"], one["config"], one["paper"] or "–"))
    widths = [max(len(row[i]) for row in rows) + 2 for i in range(5)]
    lines = ["".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)) + row[-1] for row in rows]
    return "\n".join(lines)
