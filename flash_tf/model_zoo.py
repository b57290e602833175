"""Every system that the package has: what can be said of it without training it."""

import math

from flash_tf import config, model_stats
from flash_tf.training import modelling

FOLDERS = ("wikitext2_lm", "wikitext2_mlm")  # every system has a small config in one of them, or in both
LONG = 2**20  # tokens, where what grows fastest is all that counts


def systems() -> list[dict]:
    """The systems, by name.

    Returns:
      For each: `name`; `config`, its small one; `paper`, where it is from; `causal`, whether it has a causal form;
      `state`, of its decoding: "constant", "cache", which grows with the text, or "none", where it does not decode;
      `complexity`, of its forward pass over a text of n tokens: "n", "n^2", as its FLOPs grow with n.
    """
    names = {}
    for folder in reversed(FOLDERS):  # the causal one counts where there are both
        for name in config.names():
            if name.startswith(f"{folder}/"):
                names[name.partition("/")[2]] = name
    return [_said(name, names[name]) for name in sorted(names)]


def _said(name, where):
    loaded = modelling.with_masking(config.load(where))
    with model_stats.without_weights():
        model = modelling.make_model(loaded)
    streams = model.causal and model.obstacle is None
    return {
        "name": name,
        "config": where,
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
    """`systems()` as a table for people."""
    rows = [("system", "causal", "state", "FLOPs", "config", "paper")]
    for one in found:
        causal = "yes" if one["causal"] else "no"
        rows.append((one["name"], causal, one["state"], one["complexity"], one["config"], one["paper"] or "–"))
    widths = [max(len(row[i]) for row in rows) + 2 for i in range(5)]
    lines = ["".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)) + row[-1] for row in rows]
    return "\n".join(lines)
