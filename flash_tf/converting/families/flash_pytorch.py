"""FLASH of lucidrains' `FLASH-pytorch`: the causal `FLASHTransformer`.

The library writes no config.json: give one with `"model_type": "flash_pytorch"` and the arguments of the class. Its
rotation pairs neighbours among the first channels, and ours pairs channel i with i + s/2, so channels change places.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flash_tf.converting.entries import Entry
from flash_tf.models.causal_lm import CausalLM

LIBRARY, ARCHITECTURE, MODEL = "FLASH-pytorch", "FLASHTransformer", CausalLM
FIXED = {"causal": True, "norm_type": "scalenorm", "laplace_attn_fn": False}
IGNORED = r"(inv_freq|rotary_pos_emb\.\w+)$"
PREFIX, HEAD = "", "to_logits.1.weight"
PROJECTIONS = ("in_projection", "out_projection")
HEADS = ("quad_q", "lin_q", "quad_k", "lin_k")  # as rows of one matrix there
TURNING = 32  # channels that are rotated, at most
SCALE_NORM, LAYER_NORM = 1e-10, 1e-5  # epsilons; the first is below a root, and there a bound of 1e-5 on the root


def options(public: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `CausalLM`; see the folder."""
    expansion, key_dim = public.get("expansion_factor", 2), public.get("query_key_dim", 128)
    if int(expansion) != expansion:
        raise ValueError(f"expansion_factor must be a whole number, got {expansion}")
    mixer = {"chunk_size": public.get("group_size", 256), "key_dim": key_dim, "expansion": int(expansion)}
    mixer |= {"scale": "paper_appendix", "chunk_divisor": True, "t5_bias": True}
    mixer |= {"rotary_dim": TURNING if key_dim > TURNING else None, "token_shift": public.get("shift_tokens", True)}
    return {
        "vocabulary_size": public["num_tokens"],
        "width": public["dim"],
        "depth": public["depth"],
        "mixer": {"type": "flash", **mixer},
        "norm": "scale_norm",
        "norm_epsilon": SCALE_NORM,
        "head_norm": "layer_norm",
        "head_norm_epsilon": LAYER_NORM,
        "tie_embeddings": False,
    }


def public(model: CausalLM) -> dict[str, Any]:
    """The public config; see the folder."""
    mixer = model.blocks[0].inner
    return {
        "num_tokens": model.vocabulary_size,
        "dim": model.width,
        "depth": model.depth,
        "group_size": mixer.chunk_size,
        "query_key_dim": mixer.key_dim,
        "expansion_factor": mixer.expansion,
        "shift_tokens": mixer.token_shift,
    }


def entries(model: CausalLM) -> Iterator[Entry]:
    """The weights; see the folder."""
    yield Entry("embedding/embeddings", ("token_emb.weight",))
    yield Entry("embedding/reverse_embeddings", (HEAD,), turned=True)
    yield Entry("output_bias", ("to_logits.1.bias",))
    yield Entry("positions/a", ("abs_pos_emb.scale",), shape=(1,))
    yield Entry("final_norm/gamma", ("to_logits.0.weight",))
    yield Entry("final_norm/beta", ("to_logits.0.bias",))
    for i, mixer in enumerate(model.mixers):
        at, ours, e, s = f"layers.{i}", f"mixer_{i}/mixer", mixer.value_width, mixer.key_dim
        order = channels(s, mixer.rotary_dim or s)
        split = {"parts": (2 * e, s), "order": (*range(e, 2 * e), *range(e), *(2 * e + c for c in order))}
        for kind, turned in (("weight", True), ("bias", False)):
            inside, outside = (f"{ours}/{name}/{'kernel' if turned else 'bias'}" for name in PROJECTIONS)
            yield Entry(inside, (f"{at}.to_hidden.0.{kind}", f"{at}.to_qk.0.{kind}"), turned=turned, **split)
            yield Entry(outside, (f"{at}.to_out.{kind}",), turned=turned)
        for kind in ("gamma", "beta"):
            for row, head in enumerate(HEADS):
                theirs = (f"{at}.qk_offset_scale.{kind}#{row}",)
                yield Entry(f"{ours}/offset_scale/{kind}_{head}", theirs, order=order)
        theirs = (f"{at}.rel_pos_bias.relative_attention_bias.weight",)
        yield Entry(f"{ours}/relative_bias/table", theirs, shape=(mixer.bias.table.shape[0], 1))
        yield Entry(f"mixer_{i}/norm/g", (f"{at}.norm.g",), shape=(1,))


def channels(s: int, turning: int) -> tuple[int, ...]:
    """For each of our s channels, the public one."""
    middle = (s + turning) // 2
    first, second = (*range(0, turning, 2), *range(turning, middle)), (*range(1, turning, 2), *range(middle, s))
    return first + second
