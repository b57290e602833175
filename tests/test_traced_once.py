"""Layers that TensorFlow traces once: calls give the numbers and the gradients that tracing each of them gives."""

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
from tests import backends, numerics, tiers
from tests.contracts.test_mixers import cases, is_causal, may_be_causal

B, N, V = 2, 21, 50
FLASH = {"type": "flash", "chunk_size": 4, "key_dim": 8}
LINEAR = {"type": "linear_attention", "block_size": 8}  # where no mixer matters: it is traced soon
TWO_KINDS = {"mixer": [FLASH, {"type": "gau", "key_dim": 8}], "depth": 6, "feedforward": {"type": "glu"}}


def made(kind="causal_lm", **options):
    backends.seed(1)
    model = MODELS.build({"type": kind, "vocabulary_size": V, "width": 32, "depth": 3, "mixer": FLASH, **options})
    model.build()
    for weight in model.trainable_variables:
        weight.assign(weight.value + 0.1 * np.random.default_rng(2).normal(size=weight.shape).astype(weight.dtype))
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
        own = collections.Counter(node.op for node in nodes)
        return sum((count(functions[name]) for name in called), own)

    return count(graph.node)


def products(concrete):
    """The operators of a program that no two layers share."""
    return {name: count for name, count in operators(concrete).items() if "MatMul" in name or name == "Einsum"}


def by_layer(function, *arguments):
    """A program of TensorFlow whose layers XLA compiles, one by one."""
    with forward_only(by_layer=True):
        return tf.function(function, autograph=False).get_concrete_function(*arguments)


def compiled_alone(concrete):
    """The names of the functions that a program has XLA compile, at each call of them."""
    nodes = concrete.graph.as_graph_def().node
    return [node.attr["f"].func.name for node in nodes if node.attr["_XlaMustCompile"].b]


def compiled(function, *arguments):
    """How often a program as XLA takes it has each instruction."""
    with forward_only():
        program = tf.function(function, autograph=False, jit_compile=True)
        text = program.experimental_get_compiler_ir(*arguments)(stage="hlo")
    return collections.Counter(re.findall(r"^.* = \S+ ([\w-]+)\(", text, re.MULTILINE))


def both(monkeypatch, function, *arguments):
    """The program with copies, and the one in which each layer was traced."""
    called = program(function, *arguments)
    monkeypatch.setattr(traced_once, "FEW", 99)
    return called, program(function, *arguments)


def equal(called, traced, *arguments, tolerance=numerics.FLOAT32):
    """Whether two programs give the same numbers. In a function TensorFlow may join other operators."""
    found, wanted = (tf.nest.flatten(one(*arguments)) for one in (called, traced))
    same = lambda a, b: np.array_equal(a, b, equal_nan=True) or numerics.relative_error(a, b) < tolerance  # noqa: E731
    return all(same(a, b) for a, b in zip(found, wanted, strict=True))


CAUSAL = [case for case in cases(MIXERS, changed=False) if is_causal(*case.values)]
ANY = [case for case in cases(MIXERS, changed=False) if may_be_causal(case.values[1])]


def options_of(cls, options):
    (kind,) = [name for name in MIXERS.names() if MIXERS.get(name) is cls]
    return {"type": kind, **{name: value for name, value in options.items() if name != "causal"}}


@pytest.mark.parametrize(("cls", "options"), tiers.of_kinds(CAUSAL, "linear_attention"))
def test_a_program_that_reads_and_writes_has_the_products_of_one_whose_layers_are_all_traced(cls, options, monkeypatch):
    model = made(mixer=options_of(cls, options))
    if model.obstacle is not None:
        pytest.skip(model.obstacle)
    valid = tf.constant([N, 9])

    def write(ids):
        logits, state = model.extend(ids, model.initial_state(B, N + 5 if model.grows else None), valid, last=True)
        return greedy(model, tf.argmax(logits[:, 0], -1), state, 5)

    write(token_ids())  # makes what is made once
    called, traced = both(monkeypatch, write, token_ids())
    assert products(called) == products(traced)
    assert equal(called, traced, token_ids())


@pytest.mark.parametrize(("cls", "options"), tiers.of_kinds(ANY, "linformer"))
def test_a_program_that_encodes_has_the_products_of_one_whose_layers_are_all_traced(cls, options, monkeypatch):
    kind = "causal_lm" if is_causal(cls, options) else "masked_lm"
    model = made(kind, mixer=options_of(cls, options), feedforward={"type": "mlp"})
    real = tf.sequence_mask([N, 9], N)
    encode = lambda ids: model.encode(ids, padding_mask=real)  # noqa: E731
    called, traced = both(monkeypatch, encode, token_ids())
    assert products(called) == products(traced)
    assert equal(called, traced, token_ids())


def step_of(model, *options):
    """A program that gives a loss and its gradients."""
    weights = [v.value for v in model.trainable_variables]  # of float64, so that small sums of large numbers are right

    def step(ids):
        with tf.GradientTape() as tape:
            x = model.encode(ids, *options, training=True)
            loss = tf.reduce_sum(x**2 * tf.cast(np.linspace(0, 1, x.shape[-1]), x.dtype))
        gradients = tape.gradient(loss, weights)
        return [loss, *(tf.convert_to_tensor(g) for g in gradients if g is not None)]

    return step


def traced(monkeypatch, function, *arguments, **options):
    """The results of a program whose layers are called, and of one in which each was traced."""
    found = tf.function(function, autograph=False, **options)(*arguments)
    monkeypatch.setattr(traced_once, "FEW", 99)
    return found, tf.function(function, autograph=False, **options)(*arguments)


def worst(found, wanted):
    return max(numerics.relative_error(a, b) for a, b in zip(found, wanted, strict=True))


OTHERS = ({"remat": True}, TWO_KINDS, {"feedforward": {"type": "mlp"}, "norm": "layer_norm"})
OPTIONS = [{}, *(pytest.param(options, marks=pytest.mark.full) for options in OTHERS)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_program_that_trains_has_the_gradients_of_one_whose_layers_are_all_traced(options, monkeypatch):
    model = made(**options, dtype="float64")
    found, wanted = traced(monkeypatch, step_of(model, tf.sequence_mask([N, 9], N)), token_ids())
    assert len(found) > 10 and worst(found, wanted) < numerics.FLOAT64


@pytest.mark.full
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(("cls", "options"), [case.values for case in ANY])
def test_every_mixer_has_the_gradients_of_one_whose_layers_are_all_traced(cls, options, jit_compile, monkeypatch):
    model = made(
        "causal_lm" if is_causal(cls, options) else "masked_lm", mixer=options_of(cls, options), dtype="float64"
    )
    found, wanted = traced(monkeypatch, step_of(model), token_ids(), jit_compile=jit_compile)
    assert len(found) > 10 and worst(found, wanted) < numerics.FLOAT64


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_gradients_of_layers_with_dropout_are_those_of_the_same_draws(jit_compile, monkeypatch):
    options = {"mixer": LINEAR, "feedforward": {"type": "glu"}, "dropout": 0.5, "dtype": "float64"}
    found, wanted = (made(**options) for _ in range(2))
    step = tf.function(step_of(found), autograph=False, jit_compile=jit_compile)
    found = [step(token_ids()), step(token_ids())]
    monkeypatch.setattr(traced_once, "FEW", 99)
    step = tf.function(step_of(wanted), autograph=False, jit_compile=jit_compile)
    for one in found:
        assert worst(one, step(token_ids())) < numerics.FLOAT64
    assert worst(*found) > 0.01


def test_layers_of_a_program_that_trains_are_traced_once(monkeypatch):
    model, called = made(**TWO_KINDS), []
    for block in model.blocks:
        call = block.call
        named = lambda *a, call=call, name=block.name, **k: called.append(name) or call(*a, **k)  # noqa: E731
        monkeypatch.setattr(block, "call", named)
    tf.function(step_of(model), autograph=False).get_concrete_function(token_ids())
    assert called == ["mixer_0", "feedforward_0", "mixer_3", "feedforward_3"]


def test_as_many_layers_are_computed_again_as_asked():
    def found(remat):
        step = step_of(made(depth=6, remat=remat))
        return sum(products(tf.function(step, autograph=False).get_concrete_function(token_ids())).values())

    kept, three, six = (found(remat) for remat in (False, 3, True))
    assert kept < three and six - three == three - kept


def test_what_all_layers_read_is_computed_once():
    model = made(depth=6)
    sines = operators(tf.function(step_of(model), autograph=False).get_concrete_function(token_ids()))["Sin"]
    traced = operators(tf.function(step_of(made(depth=2)), autograph=False).get_concrete_function(token_ids()))["Sin"]
    assert 0 < sines < traced


@pytest.mark.full
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_loop_takes_gradients_inside(jit_compile, monkeypatch):
    step = step_of(made(dtype="float64", mixer=LINEAR))

    def twice(ids):
        zeros = [tf.zeros_like(x) for x in step(ids)]
        add = lambda i, sums: (i + 1, [a + b for a, b in zip(sums, step(ids + i), strict=True)])  # noqa: E731
        return tf.while_loop(lambda i, _: i < 2, add, (0, zeros))[1]

    found, wanted = traced(monkeypatch, twice, token_ids(), jit_compile=jit_compile)
    assert worst(found, wanted) < numerics.FLOAT64


def dense(count=4):
    layers = [[keras.layers.Dense(4, activation="tanh")] for _ in range(count)]
    for i, (layer,) in enumerate(layers):
        layer.build((None, 4))
        layer.bias.assign(np.full(4, i / 10, "float32"))
    return layers


def through(layers, x, call=lambda some, x: some[0](x)):
    one = TracedOnce(call, layers)
    for some in layers:
        x = one(some, x)
    return x


X = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")


def in_program(gradients, *arguments):
    """Gradients in a program, and by TensorFlow's eager execution, which traces nothing."""
    return tf.function(gradients, autograph=False)(*arguments), gradients(*arguments)


def test_xla_compiles_layers_that_are_alike_once_and_others_alone():
    layers, x = dense(6), tf.constant(X)
    called = by_layer(lambda x: through(layers, x), x)
    names = compiled_alone(called)
    assert len(names) == 6 and len({*names}) == 1
    assert equal(called, program(lambda x: through(layers, x), x), x)
    layers[3][0].activation = keras.activations.relu
    called = by_layer(lambda x: through(layers, x), x)
    names = compiled_alone(called)
    assert len(names) == 6 and len({*names}) == 2 and names.count(names[3]) == 1
    assert equal(called, program(lambda x: through(layers, x), x), x)
    assert len({*compiled_alone(by_layer(lambda x: through(layers[:2], x), x))}) == 2
    assert not compiled_alone(program(lambda x: through(layers, x), x))


def test_a_gradient_goes_to_tensors_that_all_layers_read():
    layers = dense()

    def gradients(x, shared):
        with tf.GradientTape() as tape:
            tape.watch([x, shared])
            y = through(layers, x, lambda some, x: some[0](x) * tf.exp(shared))
        return tape.gradient(y, [x, shared, layers[1][0].kernel.value])

    found, wanted = in_program(gradients, tf.constant(X), tf.constant(0.5))
    assert worst(found, wanted) < numerics.FLOAT32


def test_a_gradient_of_a_gradient_is_right():
    layers = dense()

    def gradients(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = through(layers, x)
            slope = inner.gradient(y, x)
        return [slope, outer.gradient(slope, x)]

    found, wanted = in_program(gradients, tf.constant(X))
    assert worst(found, wanted) < numerics.FLOAT32


def test_a_tape_around_a_program_and_a_gradient_of_graphs_are_right():
    layers = dense()
    program = tf.function(lambda x: through(layers, x), autograph=False)
    with tf.GradientTape() as tape:
        y = program(tf.constant(X))
    kernels = [layer.kernel.value for (layer,) in layers]
    found = tape.gradient(y, kernels)

    def eager(_):
        with tf.GradientTape() as tape:
            y = through(layers, tf.constant(X))
        return tape.gradient(y, kernels)

    assert worst(found, eager(0)) < numerics.FLOAT32

    def by_graph(x):
        with tf.GradientTape():  # so that the layers are called
            y = through(layers, x)
        return tf.gradients(y, [x])

    def by_tape(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = through(layers, x)
        return [tape.gradient(y, x)]

    assert worst(tf.function(by_graph, autograph=False)(tf.constant(X)), by_tape(tf.constant(X))) < numerics.FLOAT32


def test_a_gradient_goes_to_variables_that_are_not_the_layers_own():
    layers, shared = dense(), tf.Variable(0.5)

    def gradients(x):
        with tf.GradientTape() as tape:
            y = through(layers, x, lambda some, x: some[0](x) * shared)
        return tape.gradient(y, [shared, layers[2][0].kernel.value])

    found, wanted = in_program(gradients, tf.constant(X))
    assert worst(found, wanted) < numerics.FLOAT32


def test_derivatives_in_forward_mode_are_right():
    layers = dense()

    def derivatives(x):
        kernel = layers[1][0].kernel.value
        found = []
        for primal in (x, kernel):
            with tf.autodiff.ForwardAccumulator(primal, tf.ones(primal.shape)) as forward:
                y = through(layers, x)
            found.append(forward.jvp(y))
        return found

    found, wanted = in_program(derivatives, tf.constant(X))
    assert worst(found, wanted) < numerics.FLOAT32


def test_a_gradient_goes_through_complex_numbers():
    layers = dense()

    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            turned = lambda some, x: x * tf.cast(some[0].kernel[0], tf.complex64) + 1j  # noqa: E731
            y = through(layers, tf.cast(x, tf.complex64), turned)
            loss = tf.reduce_sum(tf.abs(y))
        return tape.gradient(loss, [x, layers[1][0].kernel.value])

    found, wanted = in_program(gradients, tf.constant(X))
    assert worst(found, wanted) < numerics.FLOAT32


@pytest.mark.parametrize("small", [True, False])
def test_a_branch_keeps_what_it_asserts(small):
    layers = dense()

    def checked(some, x):
        tf.debugging.assert_less(tf.reduce_max(x), 2.0)
        return some[0](x)

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = through(layers, x, checked)
        return tape.gradient(y, x)

    run = tf.function(gradient, autograph=False)
    if small:
        assert np.any(run(tf.zeros((2, 4))))
    else:
        with pytest.raises(tf.errors.InvalidArgumentError):
            run(tf.fill((2, 4), 3.0))


def test_layers_whose_options_people_set_later_keep_them():
    layers = dense()
    for i, (layer,) in enumerate(layers):
        layer.enable_lora(2, lora_alpha=1 + i)
        layer.lora_kernel_b.assign(np.ones((2, 4), "float32"))
    layers[3][0].activation = keras.activations.relu

    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = through(layers, x)
        return [y, tape.gradient(y, x)]

    found, wanted = in_program(gradients, tf.constant(X))
    assert worst(found, wanted) < numerics.FLOAT32


def test_losses_of_layers_are_not_lost():
    layers = dense()
    for (layer,) in layers:
        layer.activity_regularizer = keras.regularizers.L2(0.1)

    class Stack(keras.Layer):
        def __init__(self):
            super().__init__()
            self.parts = [layer for (layer,) in layers]

        def call(self, x):
            return through(layers, x)

    stack = Stack()

    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(stack(x)) + sum(stack.losses)
        return [loss, *tape.gradient(loss, [layers[1][0].kernel.value])]

    found, wanted = in_program(gradients, tf.constant(X))
    assert worst(found, wanted) < numerics.FLOAT32


def test_layers_that_keep_averages_change_them():
    layers = [[keras.layers.BatchNormalization(momentum=0.5)] for _ in range(4)]
    for (layer,) in layers:
        layer.build((None, 4))
    layers[2][0].trainable = False  # then it takes the averages, and keeps them
    x = tf.constant(X)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = through(layers, 2 * x + 1, lambda some, x: 2 * some[0](x, training=True) + 1)
        return tape.gradient(y, x)

    means = lambda: [layer.moving_mean.numpy() for (layer,) in layers]  # noqa: E731
    tf.function(step, autograph=False)(x)
    found = means()
    for (layer,) in layers:
        layer.moving_mean.assign(np.zeros(4))
    step(x)
    assert worst(found, means()) < numerics.FLOAT32 and (found[0] != found[1]).all()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_xla_takes_the_same_products(dtype, monkeypatch):
    model = made(dtype=dtype)

    def write(ids):
        logits, state = model.extend(ids, model.initial_state(B), last=True)
        return greedy(model, tf.argmax(logits[:, 0], -1), state, 5)[0]

    write(token_ids())
    called = compiled(write, token_ids())
    monkeypatch.setattr(traced_once, "FEW", 99)
    assert called["dot"] == compiled(write, token_ids())["dot"] > 20


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.full
def test_blocks_of_two_kinds_are_called_in_one_program_that_is_right(dtype, monkeypatch):
    model = made(**TWO_KINDS, dtype=dtype)
    called, traced = both(monkeypatch, lambda ids: model.encode(ids), token_ids())
    assert products(called) == products(traced)
    assert equal(called, traced, token_ids(), tolerance=numerics.BFLOAT16_LAYER if "16" in dtype else numerics.FLOAT32)


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


def test_the_draws_of_layers_differ_and_go_on():
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
