"""Gated linear attention (GLA) of `flash-linear-attention`."""

from collections.abc import Iterator, Mapping
from typing import Any

from flash_tf.converting import fla
from flash_tf.converting.entries import Entry, linear
from flash_tf.models.causal_lm import CausalLM

LIBRARY, ARCHITECTURE, MODEL = "flash-linear-attention", "GLAForCausalLM", CausalLM
FIXED = {**fla.FIXED, "expand_k": 0.5, "expand_v": 1.0, "clamp_min": None, "use_gk": True, "use_gv": False}
IGNORED = "$^"
PREFIX, HEAD = fla.PREFIX, fla.HEAD


def options(public: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `CausalLM`; see the folder.

    The library divides queries by the root of their width s, and we do not. With s times its epsilon, the norm undoes
    that.
    """
    heads = public.get("num_heads", 4)
    key_dim = public["hidden_size"] // 2 // heads
    mixer = {"type": "gla", "heads": heads, "norm_epsilon": fla.rounded(public.get("norm_eps", 1e-6) * key_dim)}
    return fla.options(public, mixer, hidden_ratio=4)


def public(model: CausalLM) -> dict[str, Any]:
    """The public config; see the folder."""
    return {**fla.public(model), "num_heads": model.mixers[0].heads}


def entries(model: CausalLM) -> Iterator[Entry]:
    """The weights; see the folder. Our output gate has a bias, and theirs has none."""
    d = model.width
    yield from fla.entries(model)
    for i in range(model.depth):
        at, ours = f"model.layers.{i}.attn", f"mixer_{i}/mixer"
        qkv = (f"{at}.{part}_proj" for part in "qkv")
        yield from linear(f"{ours}/in_projection", *qkv, parts=(d // 2, d // 2, d))
        yield from linear(f"{ours}/decay_down", f"{at}.gk_proj.0")
        yield from linear(f"{ours}/decay_up", f"{at}.gk_proj.1", use_bias=True)
        yield from linear(f"{ours}/gate_projection", f"{at}.g_proj")
        yield Entry(f"{ours}/gate_projection/bias", ())
        yield from linear(f"{ours}/out_projection", f"{at}.o_proj")
        yield Entry(f"{ours}/norm_scale", (f"{at}.g_norm_swish_gate.weight",))
