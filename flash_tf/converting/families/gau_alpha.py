"""GAU-alpha of ZhuiyiTechnology, under the names of JunnYu's `GAU-alpha-pytorch`: a masked model.

Source: https://kexue.fm/archives/9052. Its rotation pairs neighbouring channels, and ours pairs channel i with i + s/2.
So its channels go into another order, even ones first, which changes no product.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flash_tf.converting.entries import Entry, linear
from flash_tf.layers.mixers.gau import GatedAttentionUnit
from flash_tf.models.masked_lm import MaskedLM

LIBRARY, ARCHITECTURE, MODEL = "GAU-alpha-pytorch", "GAUAlphaForMaskedLM", MaskedLM
FIXED = {"hidden_act": "swish", "normalization": "softmax_plus", "attention_scale": True}
IGNORED = r"(sin_pos|cos_pos|position_ids)$"
PREFIX = "gau_alpha."
HEAD = "cls.predictions.decoder.weight"
EPSILON = 1e-12  # as good as none, beside vectors of length sqrt(d)


def options(public: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `MaskedLM`; see the folder."""
    width, inner = public["hidden_size"], public["intermediate_size"]
    if inner % width:
        raise ValueError(f"intermediate_size must be a multiple of hidden_size, {width}, got {inner}")
    if (found := public.get("embedding_size") or width) != width:
        raise ValueError(f"embedding_size must be hidden_size, {width}, got {found}")
    if (found := public.get("layer_norm_eps", EPSILON)) > EPSILON:
        raise ValueError(f"layer_norm_eps must be {EPSILON} at most, got {found}")
    mixer = {"key_dim": public.get("attention_key_size", 128), "expansion": inner // width}
    mixer |= {"kernel": "softmax_plus", "relative_bias": False, "use_bias": public.get("use_bias", False)}
    return {
        "vocabulary_size": public["vocab_size"],
        "width": width,
        "depth": public["num_hidden_layers"],
        "mixer": {"type": "gau", **mixer},
        "norm": "simple_rms_norm",
        "post_norm": True,
        "embedding_norm": "simple_rms_norm",
        "position_embedding": None,
        "token_types": public.get("type_vocab_size", 2),
        "head_bias": False,
        "tie_embeddings": public.get("tie_word_embeddings", True),
    }


def public(model: MaskedLM) -> dict[str, Any]:
    """The public config; see the folder."""
    mixer = model.blocks[0].inner
    if not isinstance(mixer, GatedAttentionUnit):  # FLASH has the same options, and others
        raise ValueError("the layers are of another kind")
    return {
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.width,
        "intermediate_size": mixer.expansion * model.width,
        "attention_key_size": mixer.key_dim,
        "num_hidden_layers": model.depth,
        "type_vocab_size": model.token_types,
        "use_bias": mixer.use_bias,
        "layer_norm_eps": EPSILON,
        "tie_word_embeddings": model.tie_embeddings,
    }


def entries(model: MaskedLM) -> Iterator[Entry]:
    """The weights; see the folder."""
    yield Entry("embedding/embeddings", ("gau_alpha.embeddings.word_embeddings.weight",))
    yield Entry("types/embeddings", ("gau_alpha.embeddings.token_type_embeddings.weight",))
    if not model.tie_embeddings:
        yield Entry("embedding/reverse_embeddings", (HEAD,), turned=True)
    for i, mixer in enumerate(model.mixers):
        at, ours, use_bias = f"gau_alpha.encoder.layer.{i}.gau", f"mixer_{i}/mixer", mixer.use_bias
        order = (*range(0, mixer.key_dim, 2), *range(1, mixer.key_dim, 2))
        for entry in linear(f"{ours}/in_projection", f"{at}.i_dense", use_bias=use_bias):
            yield entry._replace(order=(*range(w := 2 * mixer.value_width), *(w + c for c in order)))
        yield from linear(f"{ours}/out_projection", f"{at}.o_dense", use_bias=use_bias)
        for head in "qk":
            yield Entry(f"{ours}/offset_scale/gamma_{head}", (f"{at}.{head}_scaleoffset.weight",), order=order)
            if use_bias:
                yield Entry(f"{ours}/offset_scale/beta_{head}", (f"{at}.{head}_scaleoffset.bias",), order=order)
