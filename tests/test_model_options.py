"""Options of a language model that other papers than FLASH have: norms and projections at both ends, no biases."""

import copy
import math
import re

import keras
import numpy as np
import pytest

import flash_tf as ft
from flash_tf.layers import GLU, ResidualBlock
from flash_tf.models import MODELS
from tests.backends import to_numpy
from tests.numerics import FLOAT32, relative_error

B, N, V, D = 2, 11, 50, 16
MIXER = {"type": "self_attention", "heads": 2, "use_bias": False}
SMALL = {"vocabulary_size": V, "width": D, "depth": 1, "mixer": MIXER, "norm": "layer_norm_without_bias"}
ENDS = {"embedding_norm": "layer_norm", "head_bias": False, "head_norm": "rms_norm", "head_projection": True}
IDS = np.random.default_rng(0).integers(0, V, [B, N]).astype("int32")


def model_of(kind="causal_lm", **options):
    model = MODELS.build({"type": kind, **SMALL, **options})
    model.build()
    rng = np.random.default_rng(6)
    for weight in model.trainable_variables:
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * rng.normal(size=weight.shape))
    return model


def standardized(x):
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)


def weights_of(layer):
    return {weight.name: to_numpy(weight.value).astype("float64") for weight in layer.weights}


def test_the_head_is_a_projection_a_norm_and_the_embedding_without_a_bias():
    model = model_of(**ENDS)
    x = np.random.default_rng(1).normal(size=[B, N, D])
    dense, scale = weights_of(model.transform), weights_of(model.final_norm)["scale"]
    y = x @ dense["kernel"] + dense["bias"]
    y = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
    y = y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + 1e-5) * scale
    want = y @ weights_of(model.embedding)["embeddings"].T
    got = model.head(model.final_norm(model.project(keras.ops.convert_to_tensor(x, "float32"))))
    assert relative_error(to_numpy(got), want) < FLOAT32
    assert model.output_bias is None


def test_the_first_block_sees_the_norm_of_the_embeddings():
    model = model_of(embedding_norm="layer_norm", position_embedding=None)
    norm = weights_of(model.first_norm)
    want = standardized(weights_of(model.embedding)["embeddings"][IDS]) * norm["gamma"] + norm["beta"]
    assert relative_error(to_numpy(model.embed(keras.ops.convert_to_tensor(IDS), None)), want) < FLOAT32


@pytest.mark.parametrize(
    "options",
    [ENDS, {}, {"post_norm": True, "tie_embeddings": False, "token_types": 2}],
    ids=["both_ends", "norm_without_bias", "norms_after_sums_and_a_head_of_its_own"],
)
def test_a_text_read_token_by_token_has_the_logits_of_one_pass(options):
    model = model_of(**options)
    state, found = model.initial_state(B, capacity=N), []
    for i in range(N):
        logits, state = model.extend(IDS[:, i : i + 1], state)
        found.append(to_numpy(logits))
    assert relative_error(np.concatenate(found, axis=1), to_numpy(model(IDS))) < FLOAT32


def test_norms_after_sums_and_types_of_tokens_are_their_formulas():
    feedforward = {"type": "mlp", "hidden": 24}
    model = model_of("masked_lm", post_norm=True, token_types=2, feedforward=feedforward, position_embedding=None)
    types = np.random.default_rng(3).integers(0, 2, [B, N]).astype("int32")
    table, of_types = (weights_of(layer)["embeddings"] for layer in (model.embedding, model.types))
    x = table[IDS] + of_types[types]
    for block in model.blocks:
        y = x + to_numpy(block.inner(keras.ops.convert_to_tensor(x, "float32")))
        x = standardized(y) * weights_of(block.norm)["gamma"]
    want = standardized(x) * weights_of(model.final_norm)["gamma"] @ table.T + to_numpy(model.output_bias.value)
    assert relative_error(to_numpy(model(IDS, token_type_ids=types)), want) < FLOAT32
    assert np.array_equal(to_numpy(model(IDS)), to_numpy(model(IDS, token_type_ids=np.zeros_like(IDS))))


@pytest.mark.parametrize(("mixer", "message"), [
    ({"type": "self_attention", "heads": 4, "kv_heads": 3}, "kv_heads must divide heads, got kv_heads 3, heads 4"),
    ({"type": "self_attention", "kv_heads": 1, "kernel": "relu2"}, "kv_heads needs kernel 'softmax', got 'relu2'"),
    ({"type": "self_attention", "rotary": False, "rope_theta": 9.0}, "the default without rotary, got 9.0"),
    ({"type": "retention", "rope_theta": 1.0}, "needs rope_theta > 1, got 1.0"),
    ({"type": "gla", "norm_epsilon": 0.0}, "needs norm_epsilon > 0, got 0.0"),
    ({"type": "gau", "kernel": "softmax_plus"}, "kernel 'softmax_plus' needs relative_bias false"),
    ({"type": "flash", "t5_bias": True, "relative_bias": False}, "t5_bias needs relative_bias true, got False"),
    ({"type": "flash", "chunk_divisor": True, "parts": "local"}, "needs parts 'both' or 'global', got 'local'"),
    ({"type": "flash", "rotary_dim": 130}, "an even rotary_dim from 2 to key_dim, 128, got 130"),
    ({"type": "flash", "rotary_heads": "global"}, "rotary_heads must be one of all, local, none, got 'global'"),
    ({"type": "flash", "rotary_heads": "local", "parts": "local"}, "'local' needs parts 'both', got 'local'"),
    ({"type": "flash", "rotary_heads": "none", "rotary_dim": 32}, "needs rotary_heads 'all' or 'local', got 'none'"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_named(mixer, message):
    with pytest.raises(ValueError, match=message):
        model_of(mixer=mixer)


@pytest.mark.parametrize("mixer", ["flash", None, GLU])
def test_a_mixer_that_is_no_mapping_is_named(mixer):
    with pytest.raises(ValueError, match="CausalLM: mixer must be dict or a list of dict, got "):
        MODELS.get("causal_lm")(64, width=8, depth=2, mixer=mixer)
    with pytest.raises(ValueError, match="a mixer needs a mapping with a `type`, got {'heads': 2}"):
        MODELS.get("causal_lm")(64, width=8, depth=2, mixer={"heads": 2})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ft.layers.MixedChunkAttention(chunk_size=2.5), "chunk_size must be int, got 2.5 (float)"),
        (lambda: ft.layers.GatedLinearAttention("four"), "heads must be int or null, got 'four' (str)"),
        (lambda: ft.layers.MLP(hidden=True), "hidden must be int or null, got True (bool)"),
        (lambda: ft.layers.ResidualBlock(GLU(), dropout="0.1"), "dropout must be float, got '0.1' (str)"),
        (lambda: ft.layers.RelativeBias("symmetric"), "width must be int, got 'symmetric' (str)"),
        (lambda: ft.models.CausalLM("64", 8, 1, {"type": "gau"}), "vocabulary_size must be int, got '64' (str)"),
    ],
)
def test_an_option_of_another_type_is_named_in_python_too(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_numbers_of_numpy_and_copies_are_as_good():
    layer = ft.layers.MixedChunkAttention(chunk_size=np.int64(8), key_dim=np.int32(4))
    assert copy.deepcopy(layer).chunk_size == 8


def test_a_model_without_biases_has_none():
    feedforward = {"type": "mlp", "use_bias": False}
    model = model_of(feedforward=feedforward, head_bias=False, position_embedding=None)
    kinds = {weight.path.rpartition("/")[2] for weight in model.trainable_variables}
    assert kinds == {"embeddings", "kernel", "gamma"}


def test_a_block_takes_the_norm_without_bias():
    block = ResidualBlock(GLU(), norm="layer_norm_without_bias")
    x = np.random.default_rng(2).normal(size=[B, N, D]).astype("float32")
    assert relative_error(to_numpy(block.norm(x)), standardized(x.astype("float64"))) < FLOAT32
