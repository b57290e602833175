"""LLaMA of Hugging Face's `transformers`."""

from collections.abc import Iterator, Mapping
from typing import Any

from flash_tf.converting.entries import Entry, linear
from flash_tf.models.causal_lm import CausalLM

LIBRARY, ARCHITECTURE, MODEL = "transformers", "LlamaForCausalLM", CausalLM
FIXED: dict[str, Any] = {}
IGNORED = r"rotary_emb\.inv_freq$"
PREFIX = "model."
HEAD = "lm_head.weight"
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}


def options(public: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `CausalLM`; see the folder."""
    heads, width = public["num_attention_heads"], public["hidden_size"]
    if (head_dim := public.get("head_dim") or width // heads) != width // heads:
        raise ValueError(f"head_dim must be hidden_size / num_attention_heads, {width // heads}, got {head_dim}")
    if (activation := public.get("hidden_act", "silu")) not in ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    kv_heads = public.get("num_key_value_heads") or heads
    mixer = {"heads": heads, "kv_heads": None if kv_heads == heads else kv_heads, "rope_theta": rope_theta(public)}
    use_bias = public.get("attention_bias", False)
    feedforward = {"hidden": public["intermediate_size"], "activation": ACTIVATIONS[activation]}
    return {
        "vocabulary_size": public["vocab_size"],
        "width": width,
        "depth": public["num_hidden_layers"],
        "mixer": {"type": "self_attention", "use_bias": use_bias, **mixer},
        "feedforward": {"type": "glu", "use_bias": public.get("mlp_bias", False), **feedforward},
        "norm": "rms_norm",
        "position_embedding": None,
        "head_bias": False,
        "tie_embeddings": public.get("tie_word_embeddings", False),
        "norm_epsilon": public.get("rms_norm_eps", 1e-6),
    }


def rope_theta(public: Mapping[str, Any]) -> float:
    """The base of the rotation, as version 5 of `transformers` writes it, or versions before it."""
    rope = public.get("rope_parameters") or {"rope_theta": public.get("rope_theta", 10_000.0)}
    scaling = {**(public.get("rope_scaling") or {}), **rope}
    if (kind := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
        raise ValueError(f"rope scaling is not supported: rope_type must be 'default', got {kind!r}")
    return float(rope["rope_theta"])


def public(model: CausalLM) -> dict[str, Any]:
    """The public config; see the folder."""
    mixer, feedforward = model.blocks[0].inner, model.blocks[1].inner
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(feedforward.activation)
    return {
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads or mixer.heads,
        "head_dim": model.width // mixer.heads,
        "intermediate_size": feedforward.inner,
        "hidden_act": activation or "silu",
        "attention_bias": mixer.use_bias,
        "mlp_bias": feedforward.use_bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": mixer.rope_theta},
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
    }


def entries(model: CausalLM) -> Iterator[Entry]:
    """The weights; see the folder."""
    yield Entry("embedding/embeddings", ("model.embed_tokens.weight",))
    if not model.tie_embeddings:
        yield Entry("embedding/reverse_embeddings", (HEAD,), turned=True)
    for i, mixer in enumerate(model.mixers):
        at, ours = f"model.layers.{i}", f"mixer_{i}/mixer"
        qkv = (f"{at}.self_attn.{part}_proj" for part in "qkv")
        yield from linear(f"{ours}/in_projection", *qkv, parts=tuple(mixer.widths), use_bias=mixer.use_bias)
        yield from linear(f"{ours}/out_projection", f"{at}.self_attn.o_proj", use_bias=mixer.use_bias)
        yield from glu(model, i, f"{at}.mlp")
        yield Entry(f"mixer_{i}/norm/scale", (f"{at}.input_layernorm.weight",))
        yield Entry(f"feedforward_{i}/norm/scale", (f"{at}.post_attention_layernorm.weight",))
    yield Entry("final_norm/scale", ("model.norm.weight",))


def glu(model: CausalLM, i: int, theirs: str) -> Iterator[Entry]:
    """Entries of the feed-forward layer of block i, whose public name starts with `theirs`."""
    ours, use_bias = f"feedforward_{i}/feedforward", model.blocks[2 * i + 1].inner.use_bias
    yield from linear(f"{ours}/in_projection", f"{theirs}.gate_proj", f"{theirs}.up_proj", use_bias=use_bias)
    yield from linear(f"{ours}/out_projection", f"{theirs}.down_proj", use_bias=use_bias)
