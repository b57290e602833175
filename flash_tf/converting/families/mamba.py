"""Mamba of Hugging Face's `transformers`."""

from collections.abc import Iterator, Mapping
from typing import Any

from flash_tf.converting.entries import Entry, linear
from flash_tf.models.causal_lm import CausalLM

LIBRARY, ARCHITECTURE, MODEL = "transformers", "MambaForCausalLM", CausalLM
FIXED = {"use_bias": False, "use_conv_bias": True, "hidden_act": "silu"}
IGNORED = "$^"
PREFIX = "backbone."
HEAD = "lm_head.weight"


def options(public: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `CausalLM`; see the folder."""
    width, expansion = public["hidden_size"], public.get("expand", 2)
    if (inner := public.get("intermediate_size", expansion * width)) != expansion * width:
        raise ValueError(f"intermediate_size must be expand * hidden_size, {expansion * width}, got {inner}")
    rank = public.get("time_step_rank", "auto")
    mixer = {"state_size": public.get("state_size", 16), "conv_width": public.get("conv_kernel", 4)}
    return {
        "vocabulary_size": public["vocab_size"],
        "width": width,
        "depth": public["num_hidden_layers"],
        "mixer": {"type": "mamba", "expansion": expansion, "dt_rank": None if rank == "auto" else rank, **mixer},
        "norm": "rms_norm",
        "position_embedding": None,
        "head_bias": False,
        "tie_embeddings": public.get("tie_word_embeddings", True),
        "norm_epsilon": public.get("layer_norm_epsilon", 1e-5),
    }


def public(model: CausalLM) -> dict[str, Any]:
    """The public config; see the folder."""
    mixer = model.blocks[0].inner
    return {
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "state_size": mixer.state_size,
        "conv_kernel": mixer.conv_width,
        "expand": mixer.expansion,
        "intermediate_size": mixer.inner,
        "time_step_rank": mixer.rank,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
    }


def entries(model: CausalLM) -> Iterator[Entry]:
    """The weights; see the folder."""
    yield Entry("embedding/embeddings", ("backbone.embeddings.weight",))
    if not model.tie_embeddings:
        yield Entry("embedding/reverse_embeddings", (HEAD,), turned=True)
    projections = {"in_projection": "in_proj", "state_projection": "x_proj", "step_projection": "dt_proj"}
    vectors = {"conv_bias": "conv1d.bias", "step_bias": "dt_proj.bias", "skip": "D"}
    for i, mixer in enumerate(model.mixers):
        at, ours, e = f"backbone.layers.{i}.mixer", f"mixer_{i}/mixer", mixer.inner
        for name, theirs in {**projections, "out_projection": "out_proj"}.items():
            yield from linear(f"{ours}/{name}", f"{at}.{theirs}")
        for name, theirs in vectors.items():
            yield Entry(f"{ours}/{name}", (f"{at}.{theirs}",))
        yield Entry(f"{ours}/conv_weights", (f"{at}.conv1d.weight",), turned=True, shape=(e, 1, mixer.conv_width))
        yield Entry(f"{ours}/log_decay_rate", (f"{at}.A_log",), shape=(e, mixer.state_size))
        yield Entry(f"mixer_{i}/norm/scale", (f"backbone.layers.{i}.norm.weight",))
    yield Entry("final_norm/scale", ("backbone.norm_f.weight",))
