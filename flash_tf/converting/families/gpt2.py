"""GPT-2 of Hugging Face's `transformers`."""

from collections.abc import Iterator, Mapping
from typing import Any

from flash_tf.converting.entries import Entry
from flash_tf.models.causal_lm import CausalLM

LIBRARY, ARCHITECTURE, MODEL = "transformers", "GPT2LMHeadModel", CausalLM
FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
IGNORED = r"attn\.(masked_)?bias$"  # causal masks
PREFIX = "transformer."
HEAD = "lm_head.weight"
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}


def options(public: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `CausalLM`; see the folder."""
    if (activation := public.get("activation_function", "gelu_new")) not in ACTIVATIONS:
        raise ValueError(f"activation_function must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    width = public["n_embd"]
    hidden = public.get("n_inner") or 4 * width
    return {
        "vocabulary_size": public["vocab_size"],
        "width": width,
        "depth": public["n_layer"],
        "mixer": {"type": "self_attention", "heads": public["n_head"], "rotary": False},
        "feedforward": {"type": "mlp", "hidden": hidden, "activation": ACTIVATIONS[activation]},
        "norm": "layer_norm",
        "position_embedding": "learned",
        "max_length": public["n_positions"],
        "head_bias": False,
        "tie_embeddings": public.get("tie_word_embeddings", True),
        "norm_epsilon": public.get("layer_norm_epsilon", 1e-5),
    }


def public(model: CausalLM) -> dict[str, Any]:
    """The public config; see the folder."""
    mixer, feedforward = model.blocks[0].inner, model.blocks[1].inner
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(feedforward.activation)
    return {
        "vocab_size": model.vocabulary_size,
        "n_embd": model.width,
        "n_layer": model.depth,
        "n_head": mixer.heads,
        "n_inner": feedforward.inner,
        "n_positions": model.max_length,
        "activation_function": activation or "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
    }


def entries(model: CausalLM) -> Iterator[Entry]:
    """The weights; see the folder. `Conv1D` of GPT-2 keeps its matrices as `[in, out]`, as we do."""
    yield Entry("embedding/embeddings", ("transformer.wte.weight",))
    yield Entry("positions/embeddings", ("transformer.wpe.weight",))
    if not model.tie_embeddings:
        yield Entry("embedding/reverse_embeddings", (HEAD,), turned=True)
    layers = {"in_projection": "attn.c_attn", "out_projection": "attn.c_proj"}
    named = {f"mixer_{{}}/mixer/{ours}": theirs for ours, theirs in layers.items()}
    layers = {"in_projection": "mlp.c_fc", "out_projection": "mlp.c_proj"}
    named |= {f"feedforward_{{}}/feedforward/{ours}": theirs for ours, theirs in layers.items()}
    for i in range(model.depth):
        at = f"transformer.h.{i}"
        for ours, theirs in named.items():
            yield Entry(f"{ours.format(i)}/kernel", (f"{at}.{theirs}.weight",))
            yield Entry(f"{ours.format(i)}/bias", (f"{at}.{theirs}.bias",))
        for ours, theirs in (("mixer", "ln_1"), ("feedforward", "ln_2")):
            yield Entry(f"{ours}_{i}/norm/gamma", (f"{at}.{theirs}.weight",))
            yield Entry(f"{ours}_{i}/norm/beta", (f"{at}.{theirs}.bias",))
    yield Entry("final_norm/gamma", ("transformer.ln_f.weight",))
    yield Entry("final_norm/beta", ("transformer.ln_f.bias",))
