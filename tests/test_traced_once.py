"""Layers that TensorFlow traces once: their copies have the operators that tracing each of them gives."""

import collections
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from flash_tf.generation.decoding import greedy
from flash_tf.layers import traced_once
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.traced_once import TracedOnce, forward_only
from flash_tf.models import MODELS
from tests import tiers
from tests.contracts.test_mixers import cases, is_causal, may_be_causal

B, N, V = 2, 21, 50
PASSING = ("Const", "Identity", "NoOp", "ReadVariableOp")  # a weight or a constant may be read once for two uses
FLASH = {"type": "flash", "chunk_size": 4, "key_dim": 8}
TWO_KINDS = {"mixer": [FLASH, {"type": "gau", "key_dim": 8}], "depth": 6, "feedforward": {"type": "glu"}}


def made(kind="causal_lm", **options):
    keras.utils.set_random_seed(1)
    model = MODELS.build({"type": kind, "vocabulary_size": V, "width": 32, "depth": 3, "mixer": FLASH, **options})
    model.build()
    for weight in model.trainable_variables:
        weight.assign(weight.value + 0.1 * np.random.default_rng(2).normal(size=weight.shape).astype("float32"))
    return model


def token_ids():
    return tf.constant(np.random.default_rng(0).integers(0, V, (B, N)), tf.int32)


def program(function, *arguments):
    with forward_only():
        return tf.function(function, autograph=False).get_concrete_function(*arguments)


def operators(concrete):
    """How often a program has each operator, in the functions that it calls too."""
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name: function.node_def for function in graph.library.function}

    def count(nodes):
        called = [x.func.name for node in nodes for x in node.attr.values() if x.HasField("func")]
        own = collections.Counter(node.op.removeprefix("Stateless") for node in nodes if node.op not in PASSING)
        return sum((count(functions[name]) for name in called), own)

    return count(graph.node)


def compiled(function, *arguments):
    """How often a program as XLA takes it has each instruction."""
    with forward_only():
        program = tf.function(function, autograph=False, jit_compile=True)
        text = program.experimental_get_compiler_ir(*arguments)(stage="hlo")
    return collections.Counter(re.findall(r"^.* = \S+ ([\w-]+)\(", text, re.MULTILINE))


def both(monkeypatch, function, *arguments):
    """The program with copies, and the one in which each layer was traced."""
    copied = program(function, *arguments)
    monkeypatch.setattr(traced_once, "FEW", 99)
    return copied, program(function, *arguments)


def equal(copied, traced, *arguments):
    found, wanted = (tf.nest.flatten(one(*arguments)) for one in (copied, traced))
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, wanted, strict=True))


CAUSAL = [case for case in cases(MIXERS, changed=False) if is_causal(*case.values)]
ANY = [case for case in cases(MIXERS, changed=False) if may_be_causal(case.values[1])]


def options_of(cls, options):
    (kind,) = [name for name in MIXERS.names() if MIXERS.get(name) is cls]
    return {"type": kind, **{name: value for name, value in options.items() if name != "causal"}}


@pytest.mark.parametrize(("cls", "options"), tiers.of_kinds(CAUSAL, "linear_attention"))
def test_a_program_that_reads_and_writes_has_the_operators_of_one_whose_layers_are_all_traced(
    cls, options, monkeypatch
):
    model = made(mixer=options_of(cls, options))
    if model.obstacle is not None:
        pytest.skip(model.obstacle)
    valid = tf.constant([N, 9])

    def write(ids):
        logits, state = model.extend(ids, model.initial_state(B, N + 5 if model.grows else None), valid, last=True)
        return greedy(model, tf.argmax(logits[:, 0], -1), state, 5)

    write(token_ids())  # makes what is made once
    copied, traced = both(monkeypatch, write, token_ids())
    assert operators(copied) == operators(traced)
    assert equal(copied, traced, token_ids())


@pytest.mark.parametrize(("cls", "options"), tiers.of_kinds(ANY, "linformer"))
def test_a_program_that_encodes_has_the_operators_of_one_whose_layers_are_all_traced(cls, options, monkeypatch):
    kind = "causal_lm" if is_causal(cls, options) else "masked_lm"
    model = made(kind, mixer=options_of(cls, options), feedforward={"type": "mlp"})
    real = tf.sequence_mask([N, 9], N)
    encode = lambda ids: model.encode(ids, padding_mask=real)  # noqa: E731
    copied, traced = both(monkeypatch, encode, token_ids())
    assert operators(copied) == operators(traced)
    assert equal(copied, traced, token_ids())


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_xla_takes_the_same_instructions(dtype, monkeypatch):
    model = made(dtype=dtype)

    def write(ids):
        logits, state = model.extend(ids, model.initial_state(B), last=True)
        return greedy(model, tf.argmax(logits[:, 0], -1), state, 5)[0]

    write(token_ids())
    copied = compiled(write, token_ids())
    monkeypatch.setattr(traced_once, "FEW", 99)
    assert copied == compiled(write, token_ids()) and copied["dot"] > 20


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.full
def test_blocks_of_two_kinds_are_copied_in_one_program_that_is_right(dtype, monkeypatch):
    model = made(**TWO_KINDS, dtype=dtype)
    copied, traced = both(monkeypatch, lambda ids: model.encode(ids), token_ids())
    assert operators(copied) == operators(traced)
    assert equal(copied, traced, token_ids())


def test_each_kind_of_block_is_traced_once(monkeypatch):
    model, traced = made(**TWO_KINDS), []
    for block in model.blocks:
        call = block.call
        named = lambda *a, call=call, name=block.name, **k: traced.append(name) or call(*a, **k)  # noqa: E731
        monkeypatch.setattr(block, "call", named)
    program(lambda ids: model.encode(ids), token_ids())
    assert traced == ["mixer_0", "feedforward_0", "mixer_3", "feedforward_3"]
    traced.clear()
    tf.function(lambda ids: model.encode(ids), autograph=False).get_concrete_function(token_ids())
    assert len(traced) == 12


def test_a_program_reads_the_weights_as_they_are_when_it_runs():
    model, ids = made(), token_ids()
    encode = program(lambda ids: model.encode(ids), ids)
    before = encode(ids).numpy()
    model.blocks[2].inner.out_projection.kernel.assign(2 * model.blocks[2].inner.out_projection.kernel.value)
    after = encode(ids).numpy()
    assert (before != after).any()
    np.testing.assert_allclose(after, model.encode(ids), rtol=1e-5, atol=1e-5)


def test_gradients_go_through_a_model_that_a_program_outside_calls():
    model, ids = made(), token_ids()
    forward = tf.function(lambda ids: model.encode(ids), autograph=False)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(forward(ids) ** 2)
    gradients = tape.gradient(loss, [v.value for v in model.blocks[1].trainable_variables])
    assert all(np.any(g) for g in gradients if g is not None) and len([g for g in gradients if g is not None]) > 3


def test_layers_that_draw_are_traced_each_so_that_their_draws_differ_and_go_on():
    model, ids = made(dropout=0.5), token_ids()
    draw = program(lambda ids: model.encode(ids, training=True), ids)
    assert (draw(ids).numpy() != draw(ids).numpy()).any()
    seeds = [layer.seed_generator.state.numpy() for layer in (block.dropout for block in model.blocks)]
    assert all((a != b).any() for a, b in zip(seeds, seeds[1:], strict=False))


def test_layers_with_other_variables_are_traced_each():
    layers = [[keras.layers.Dense(4)] for _ in range(4)]
    for i, (layer,) in enumerate(layers):
        layer.build((None, 4))
        layer.bias.assign(np.full(4, i, "float32"))
    layers[2][0].enable_lora(2)
    layers.insert(2, [keras.layers.EinsumDense("ab,bc->ac", 4, bias_axes="c")])
    layers[2][0].build((None, 4))
    called = []

    def call(some, x):
        called.append(some[0].name)
        return some[0](x)

    def through(x):
        one = TracedOnce(call, layers)
        for some in layers:
            x = one(some, x)
        return x

    x = tf.constant(np.random.default_rng(0).normal(size=(2, 4)), tf.float32)
    found = program(through, x)(x)
    assert called == [layers[i][0].name for i in (0, 2, 3)]
    np.testing.assert_allclose(found, through(x), rtol=1e-5)


def test_layers_that_compute_in_another_dtype_are_traced_each():
    layers = [[keras.layers.Dense(4, dtype=dtype)] for dtype in ("mixed_bfloat16", "mixed_bfloat16", "float32")]
    for (layer,) in layers:
        layer.build((None, 4))

    def through(x):
        one = TracedOnce(lambda some, x: keras.ops.cast(some[0](x), "float32"), layers)
        for some in layers:
            x = one(some, x)
        return x

    x = tf.constant(np.random.default_rng(0).normal(size=(2, 4)), tf.float32)
    assert np.array_equal(program(through, x)(x), through(x))


def test_a_mask_of_keras_is_not_lost():
    layers = [[layer] for layer in [keras.layers.LSTM(4, return_sequences=True) for _ in range(3)]]
    masked = keras.layers.Masking()

    def through(x):
        one, x = TracedOnce(lambda some, x: some[0](x), layers), masked(x)
        for some in layers:
            x = one(some, x)
        return x

    x = tf.constant(np.random.default_rng(0).normal(size=(2, 6, 4)) * np.array([1, 1, 0, 0, 1, 0])[None, :, None])
    x = tf.cast(x, tf.float32)
    wanted = through(x)
    np.testing.assert_allclose(program(through, x)(x), wanted, rtol=1e-5, atol=1e-6)
