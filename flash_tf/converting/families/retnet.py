"""RetNet of `flash-linear-attention`."""

from collections.abc import Iterator, Mapping
from typing import Any

from flash_tf.converting import fla
from flash_tf.converting.entries import Entry, linear
from flash_tf.models.causal_lm import CausalLM

LIBRARY, ARCHITECTURE, MODEL = "flash-linear-attention", "RetNetForCausalLM", CausalLM
FIXED = {**fla.FIXED, "expand_k": 1.0, "expand_v": 2.0}
IGNORED = r"rotary\.inv_freq$"
PREFIX, HEAD = fla.PREFIX, fla.HEAD
ROPE_THETA = 10_000.0  # the library has no option for it


def options(public: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `CausalLM`; see the folder."""
    mixer = {"type": "retention", "heads": public.get("num_heads", 8), "rope_theta": ROPE_THETA, "norm_scale": True}
    return fla.options(public, {**mixer, "norm_epsilon": public.get("norm_eps", 1e-6)}, hidden_ratio=2)


def public(model: CausalLM) -> dict[str, Any]:
    """The public config; see the folder."""
    return {**fla.public(model), "num_heads": model.mixers[0].heads}


def entries(model: CausalLM) -> Iterator[Entry]:
    """The weights; see the folder."""
    d = model.width
    yield from fla.entries(model)
    for i in range(model.depth):
        at, ours = f"model.layers.{i}.attn", f"mixer_{i}/mixer"
        qkvg = (f"{at}.{part}_proj" for part in "qkvg")
        yield from linear(f"{ours}/in_projection", *qkvg, parts=(d, d, 2 * d, 2 * d))
        yield from linear(f"{ours}/out_projection", f"{at}.o_proj")
        yield Entry(f"{ours}/norm_scale", (f"{at}.g_norm_swish_gate.weight",))
