"""What the models of `flash-linear-attention` share: options, embeddings, gated feed-forward layers and norms."""

from collections.abc import Iterator, Mapping
from typing import Any

from flash_tf.converting.entries import Entry, linear
from flash_tf.models.causal_lm import CausalLM

PREFIX, HEAD = "model.", "lm_head.weight"
FIXED = {
    "num_kv_heads": None,
    "feature_map": None,
    "use_short_conv": False,
    "use_output_gate": True,
    "hidden_act": "swish",
    "elementwise_affine": True,
    "fuse_norm": True,  # false gives weights other names
    "attn": None,
    "attnres_block_size": None,
}


def options(public: Mapping[str, Any], mixer: dict[str, Any], hidden_ratio: int) -> dict[str, Any]:
    """The options of `CausalLM` around a mixer, with the library's default ratio of the feed-forward layer."""
    width = public["hidden_size"]
    ratio = public.get("hidden_ratio") or hidden_ratio
    hidden = public.get("intermediate_size") or -(-int(width * ratio * 2 / 3) // 256) * 256
    return {
        "vocabulary_size": public["vocab_size"],
        "width": width,
        "depth": public["num_hidden_layers"],
        "mixer": mixer,
        "feedforward": {"type": "glu", "hidden": hidden, "activation": "silu", "use_bias": False},
        "norm": "rms_norm",
        "position_embedding": None,
        "head_bias": False,
        "tie_embeddings": public.get("tie_word_embeddings", False),
        "norm_epsilon": public.get("norm_eps", 1e-6),
    }


def rounded(epsilon: float) -> float:
    """Twelve digits of a product, so that a division gives the factor back."""
    return float(f"{epsilon:.12g}")


def public(model: CausalLM) -> dict[str, Any]:
    """The public config of a model, without its heads."""
    return {
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "intermediate_size": model.blocks[1].inner.inner,
        "norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
    }


def entries(model: CausalLM) -> Iterator[Entry]:
    """The weights outside the mixers."""
    yield Entry("embedding/embeddings", ("model.embeddings.weight",))
    if not model.tie_embeddings:
        yield Entry("embedding/reverse_embeddings", (HEAD,), turned=True)
    for i in range(model.depth):
        at, ours = f"model.layers.{i}", f"feedforward_{i}/feedforward"
        yield from linear(f"{ours}/in_projection", f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
        yield from linear(f"{ours}/out_projection", f"{at}.mlp.down_proj")
        yield Entry(f"mixer_{i}/norm/scale", (f"{at}.attn_norm.weight",))
        yield Entry(f"feedforward_{i}/norm/scale", (f"{at}.mlp_norm.weight",))
    yield Entry("final_norm/scale", ("model.norm.weight",))
