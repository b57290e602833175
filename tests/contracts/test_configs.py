"""What every YAML under configs must satisfy. A new file there is tested here without edits."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from flash_tf import config, model_stats
from flash_tf.layers.feedforward import FEEDFORWARDS
from flash_tf.layers.mixers import MIXERS
from flash_tf.models import MODELS
from flash_tf.models.classifier import Classifier
from flash_tf.models.matcher import Matcher
from flash_tf.models.span import SpanExtractor
from flash_tf.registry import listed
from flash_tf.training import modelling
from tests import backends, tiers
from tests.backends import to_numpy
from tests.mixer_flops import forward_flops
from tests.numerics import DEAD_GRADIENT, DEAD_ROW_SUM, FAINT, FAINT_AT_PAPERS_SCALE
from tests.oracles import ORACLES


def parts_of(name):
    """The model, the mixers and the feed-forward layer of a config."""
    model = config.load(name).model
    mixers = [mixer["type"] for mixer in listed(model["mixer"])]
    return {model["type"], *mixers, (model.get("feedforward") or {}).get("type")}


def thinned():
    """Every config. The default tier takes the configs with a model or a layer that no earlier config has."""
    seen, found = set(), []
    for name in config.names():
        found.append(pytest.param(name, marks=[pytest.mark.full] if parts_of(name) <= seen else []))
        seen |= parts_of(name)
    return found


each_config = pytest.mark.parametrize("name", thinned())
SMALL = {"width": 64, "depth": 2, "vocabulary_size": 500, "heads": 4, "key_dim": 16, "chunk_size": 16, "n": 64}
# Weights of N(0, 0.02) are made for wide models: row sums fall with the fourth power of the width.
MIDDLE = {**SMALL, "width": 384, "key_dim": 128, "chunk_size": 64, "n": 256}

# Without a denominator, the sums over a text drown what stands beside them: its paper shows that it does not train.
UNBOUNDED = {"transnormer_ablations/one_plus_elu_without_scaling"}


def described(name, overrides=()):
    """The config, its model without weights, and what is said of both."""
    loaded = modelling.with_masking(config.load(name, overrides))
    with model_stats.without_weights():
        model = modelling.make_model(loaded)
        return loaded, model, model_stats.describe(loaded, model, modelling.predicted(loaded))


def count(type, **options):
    """Millions of parameters of a model of vocabulary 32,000."""
    with model_stats.without_weights():
        model = MODELS.build({"type": type, "vocabulary_size": 32_000, **options})
        model.build()
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables) / 1e6


def resized(mixer, sizes):
    """A mixer with every size that it names replaced, and so those side by side in it."""
    parts = {"mixers": [resized(part, sizes) for part in mixer["mixers"]]} if "mixers" in mixer else {}
    return {**mixer, **{k: sizes[k] for k in mixer if k in sizes}, **parts}


def shrunk(name, sizes, *overrides):
    """The config with every size that it names, of model or mixer, replaced; two sequences a step."""
    model = config.load(name).model
    sizes = {**sizes, "depth": max(sizes["depth"], len(listed(model["mixer"])))}
    small = [f"model.{k}={sizes[k]}" for k in model if k in sizes]
    mixers = [resized(mixer, sizes) for mixer in listed(model["mixer"])]
    small += [f"model.mixer={json.dumps(mixers if isinstance(model['mixer'], list) else mixers[0])}"]
    n = sizes["n"]
    small += [f"data.sequence_length={n}", f"train.tokens_per_step={2 * n}"]
    return modelling.with_masking(config.load(name, [*small, *overrides]))


def made(loaded):
    """The config's model with the same weights every time."""
    backends.seed(0)
    return modelling.make_model(loaded)


def gradients(loaded, model):
    """The loss of one step on random tokens, and its gradient of every weight."""
    if not model.predicts_tokens:
        return task_gradients(loaded, model)
    n, v = loaded.data.sequence_length, model.vocabulary_size
    rng = np.random.default_rng(0)
    tokens, options = rng.integers(0, v, [loaded.batch_size, n + 1]).astype("int32"), {}
    labels = tokens[:, 1:]
    if loaded.masking is not None:
        options["masked_positions"] = np.sort([rng.permutation(n)[: modelling.predicted(loaded)] for _ in tokens])
        labels = np.take_along_axis(labels, options["masked_positions"], axis=1)
    with tf.GradientTape() as tape:
        logits = tf.cast(model(tokens[:, :-1], training=True, **options), tf.float32)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    found = tape.gradient(loss, model.trainable_variables)
    named = zip((v.path for v in model.trainable_variables), found, strict=True)
    return float(loss), {path: to_numpy(tf.convert_to_tensor(g)) for path, g in named}


def rows_of(model, rows, n):
    """The shape of token ids that a model reads: a matcher has two texts a row."""
    return [rows, 2, n] if isinstance(model, Matcher) else [rows, n]


def task_gradients(loaded, model):
    """As `gradients`, of a model without a head over tokens: the loss is the distance of its numbers from 1."""
    shape = rows_of(model, loaded.batch_size, loaded.data.sequence_length)
    tokens = np.random.default_rng(0).integers(0, model.vocabulary_size, shape).astype("int32")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.cast(model(tokens, training=True), tf.float32) - 1) ** 2)
    found = tape.gradient(loss, model.trainable_variables)
    named = zip((v.path for v in model.trainable_variables), found, strict=True)
    return float(loss), {path: to_numpy(tf.convert_to_tensor(g)) for path, g in named}


def test_every_mixer_feedforward_and_model_has_a_config():
    models = [config.load(name).model for name in config.names()]
    assert {mixer["type"] for model in models for mixer in listed(model["mixer"])} == set(MIXERS.names())
    assert {model["feedforward"]["type"] for model in models if model.get("feedforward")} == set(FEEDFORWARDS.names())
    assert {model["type"] for model in models} == set(MODELS.names())


@each_config
def test_a_config_is_described_at_full_size_without_allocating_a_weight(name):
    _, model, said = described(name)
    assert said["parameters"] > 1e5
    assert said["training_flops_per_token"] == pytest.approx(3 * said["forward_flops_per_token"], abs=3)
    frozen = sum(int(np.prod(v.shape)) for v in model.weights) - said["parameters"]
    assert said["weight_and_optimizer_bytes"] == 12 * said["parameters"] + 4 * frozen
    assert (said["decode_state_bytes"] is None) == (not model.causal)
    assert all(variable._value is None for variable in model.variables)


def test_micro_batches_divide_the_activations():
    whole, quarter = (described("mlm_c4/flash", [f"train.accumulate={n}"])[2]["activation_bytes"] for n in (1, 4))
    assert whole == 4 * quarter > 2**37


@pytest.mark.full
def test_a_model_built_in_full_has_the_parameters_and_bytes_that_were_described():
    _, _, said = described("mlm_c4/flash")
    model = modelling.make_model(config.load("mlm_c4/flash"))
    weights = [v.numpy() for v in model.trainable_variables]
    assert sum(w.size for w in weights) == said["parameters"]
    assert 3 * sum(w.nbytes for w in weights) == said["weight_and_optimizer_bytes"]


def test_ablations_of_the_gated_attention_unit_have_the_papers_counts():
    gau = {"type": "gau"}
    sizes = {"type": "causal_lm", "width": 768, "depth": 22, "norm": "layer_norm"}
    assert round(count(mixer=gau, **sizes), 2) == 104.77  # 105 in Table 1
    assert 104 < count(mixer={**gau, "kernel": "softmax", "relative_bias": False}, **sizes) < 105
    assert round(count(mixer={**gau, "heads": 4}, **sizes), 2) == 104.77
    assert 130.5 < count(mixer={**gau, "gated": False}, **sizes) < 131.05


def test_ablations_of_self_attention_have_the_papers_counts():
    sizes = {"type": "masked_lm", "width": 768, "depth": 12, "feedforward": {"type": "mlp"}}
    plain = count(mixer={"type": "self_attention", "heads": 12}, **sizes)
    assert round(plain, 2) == 109.63  # 110 in Table 2
    for options in ({"kernel": "relu2"}, {"heads": 1}):
        assert count(mixer={"type": "self_attention", "heads": 12, **options}, **sizes) == plain
    gated = count(mixer={"type": "self_attention", "heads": 12, "gated": True}, **sizes)
    assert gated - plain == pytest.approx(12 * (768 * 768 + 768) / 1e6)  # W_u and its bias, in each layer


@each_config
def test_one_step_at_small_size_is_finite_and_reaches_every_weight(name):
    loaded = shrunk(name, SMALL)
    model = made(loaded)
    loss, found = gradients(loaded, model)
    if model.predicts_tokens:
        assert 0.5 * np.log(500) < loss < 2 * np.log(500)  # of 500 tokens, none known to be likelier
    assert found.keys() == {v.path for v in model.trainable_variables}
    assert all(np.isfinite(g).all() and g.any() for g in found.values())


def row_sum(mixer, x):
    """Mean sum of a row of a gated unit's quadratic attention weights over x `[1, n, d]`, in NumPy from its weights."""
    e, s = mixer.expansion * mixer.width, mixer.key_dim
    kernel, bias = (to_numpy(w) for w in (mixer.in_projection.kernel, mixer.in_projection.bias))
    p = x @ kernel[:, 2 * e :] + bias[2 * e :]
    z = p / (1 + np.exp(-p))  # [1, n, s]
    weights = {w.name: to_numpy(w) for w in mixer.offset_scale.weights}
    head = lambda name: ORACLES["rotary"](  # noqa: E731
        (z * weights[f"gamma_{name}"] + weights[f"beta_{name}"])[:, :, None], np.arange(z.shape[1])[None]
    )
    a, b = (to_numpy(w) for w in (mixer.bias.a, mixer.bias.b))
    ones, options = np.ones([*z.shape[:2], 1]), {"causal": mixer.causal, "scale": mixer.scale}
    if mixer.head_names == ("q", "k"):
        sums = ORACLES["gau"](head("q"), head("k"), ones[..., None], a, b, divisor=mixer.divisor, **options)
    else:
        nothing = np.zeros([*z.shape[:2], s])  # silences the linear part
        quadratic = (head("quad_q")[:, :, 0], head("quad_k")[:, :, 0])
        chunk = {"chunk_size": mixer.chunk_size, "overlapping": getattr(mixer, "overlapping", False)}
        sums = ORACLES["flash"](*quadratic, nothing, nothing, ones, a, b, **chunk, **options)
    return float(sums.mean())


def dead(loaded, model):
    """What of a model is dead at initialization: gated layers by their row sums, weights by their gradients."""
    shape = rows_of(model, 1, loaded.data.sequence_length)
    ids = np.random.default_rng(1).integers(0, model.vocabulary_size, shape).astype("int32")
    inputs = {}
    for block in model.blocks:
        block.norm.call = lambda x, norm=block.norm, name=block.name: inputs.setdefault(name, type(norm).call(norm, x))
    model(ids)
    for block in model.blocks:
        del block.norm.call
    gated = [block for block in model.blocks if {"q", "quad_q"} & set(getattr(block.inner, "head_names", ()))]
    gated = [block for block in gated if getattr(block.inner, "kernel", "relu2") == "relu2"]  # softmax's sums are 1
    sums = {block.name: row_sum(block.inner, to_numpy(inputs[block.name])) for block in gated}
    _, found = gradients(loaded, model)
    sizes = {path: float(np.sqrt(np.mean(g**2))) for path, g in found.items()}
    middle = np.median(list(sizes.values()))
    papers = any(getattr(mixer, "scale", None) == "paper_appendix" for mixer in model.mixers)
    known = FAINT | (FAINT_AT_PAPERS_SCALE if papers else {})
    faint = lambda path: known.get("/".join(path.split("/")[-2:]), 1)  # noqa: E731
    return sorted(k for k, v in sums.items() if v < DEAD_ROW_SUM) + sorted(
        path for path, size in sizes.items() if size < DEAD_GRADIENT * faint(path) * middle
    )


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(config.names()) - UNBOUNDED))
def test_every_config_at_middle_size_is_alive_at_initialization(name):
    loaded = shrunk(name, MIDDLE, "train.precision=float32")
    assert dead(loaded, made(loaded)) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["mlm_c4/flash", "lm_wiki40b/flash_quad"])
def test_gamma_of_the_papers_start_is_found_dead_at_the_default_scale(name):
    ours = ("model.mixer.scale=normalized", "model.mixer.bias_start=normal")
    loaded = shrunk(name, MIDDLE, "train.precision=float32", *ours)
    model = made(loaded)
    for mixer in model.mixers:
        for i, gamma in enumerate(mixer.offset_scale.scales):
            gamma.assign(np.random.default_rng(i).normal(0, 0.02, gamma.shape))
    assert {block.name for block in model.blocks} <= set(dead(loaded, model))


@pytest.mark.full
@pytest.mark.parametrize("name", ["mlm_c4/flash", "lm_wiki40b/flash_quad"])
def test_a_bias_that_starts_negative_is_found_dead_at_the_papers_scale(name):
    loaded = shrunk(name, MIDDLE, "train.precision=float32")
    model = made(loaded)
    for mixer in model.mixers:
        mixer.bias.b.assign(-to_numpy(mixer.bias.a))
    assert {block.name for block in model.blocks} <= set(dead(loaded, model))


@pytest.mark.parametrize("name", tiers.thinned(config.names(), "mlm_c4/flash", "lm_pg19/combiner"))
def test_a_longer_sequence_is_one_override(name):
    before, _, short = described(name)
    # cosFormer's constant and Linformer's are a part of the function, and must be no less than the length.
    mixer = listed(before.model["mixer"])[0]
    constants = [f"model.mixer.{option}=1024" for option in ("cosine_length", "max_length") if option in mixer]
    constants += ["model.max_length=1024"] if "max_length" in before.model else []
    loaded, model, said = described(name, ["data.sequence_length=1024", *constants])
    assert loaded.batch_size * 1024 == before.batch_size * before.data.sequence_length == before.train.tokens_per_step
    learned = loaded.model.get("position_embedding") == "learned"
    assert model.max_length == (1024 if learned else None)
    positions = before.model.get("max_length", before.data.sequence_length)
    more = (1024 - positions) * model.width if learned else 0
    if "max_length" in mixer:  # and mixes as many positions, in each block
        more += model.depth * mixer["heads"] * mixer["rank"] * (1024 - mixer["max_length"])
    assert said["parameters"] - short["parameters"] == more


@pytest.mark.parametrize("name", tiers.thinned(config.names(), "mlm_c4/flash", "slimpajama_lm/gla_1.3b"))
def test_flops_are_those_of_the_formulas(name):
    loaded, model, said = described(name)
    n, d = loaded.data.sequence_length, model.width
    for mixer in model.mixers:
        formula = n * forward_flops(mixer, n)
        needed = f"{type(mixer).__name__}.flops({n}) needs {formula}, by tests/mixer_flops.py"
        assert mixer.flops(n) == formula, f"{needed}, got {mixer.flops(n)}"
    feedforward = 0
    if model.feedforward:
        matrices, hidden = {"mlp": (2, 4 * d), "glu": (3, round(8 * d / 3))}[model.feedforward["type"]]
        feedforward = 2 * d * matrices * model.feedforward.get("hidden", hidden)
    head = 2 * d * model.vocabulary_size * modelling.predicted(loaded) / n
    texts = 1
    if isinstance(model, Classifier):
        texts, vectors = (2, 4) if isinstance(model, Matcher) else (1, 1)
        head = 2 * model.hidden * (vectors * d + model.classes) / n
    if isinstance(model, SpanExtractor):
        head = 2 * d * 2
    head += 2 * d * d * model.head_projection
    total = texts * (sum(forward_flops(mixer, n) for mixer in model.mixers) + model.depth * feedforward) + head
    assert said["forward_flops_per_token"] == round(total)


def test_decode_states_are_those_of_the_formulas():
    _, flash, _ = described("lm_wiki40b/flash")
    _, quad, _ = described("lm_wiki40b/flash_quad")
    _, transformer, _ = described("lm_wiki40b/transformer_plus")
    for n in (512, 1_000, 100_000):
        # A float32 sum, bfloat16 buffers of a chunk: 1.62 MiB a layer; and one counter for all.
        per_layer = 4 * 128 * 1536 + 2 * 256 * (128 + 128 + 1536)
        assert flash.decode_state_bytes(n) == 24 * per_layer + 4
        assert round(flash.decode_state_bytes(n) / 2**20, 1) == 39.0
        assert quad.decode_state_bytes(n) == 24 * 3_328 * n + 4
        assert transformer.decode_state_bytes(n) == 12 * 3_072 * n + 4


def test_hosts_of_a_strategy_are_named_and_said_not_to_be_asked():
    workers = "strategy={type: multi_worker, workers: [a:1, b:2]}"
    assert described("mlm_c4/flash")[2]["hosts"] is None
    assert model_stats.as_text(described("mlm_c4/flash", [workers])[2]).endswith(
        "hosts               a:1, b:2, which were not asked"
    )


def test_describing_holds_no_weights_back_for_a_later_model():
    _, model, _ = described("quickstart")
    with keras.StatelessScope():
        pass
    assert all(v._value is None for v in model.variables)
