"""What every mixer that can decode, and a model over it, must satisfy as a stream, on every backend."""

import inspect
import re

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers.block import ResidualBlock
from flash_tf.layers.feedforward.glu import GLU
from flash_tf.layers.mixers import MIXERS
from flash_tf.layers.mixers.flash import MixedChunkAttention
from flash_tf.models import MODELS
from tests import tiers
from tests.backends import compiled, on_jax_compiled, tensors, to_numpy
from tests.contracts.test_mixers import (
    SMALL,
    B,
    D,
    N,
    arguments,
    built,
    cases,
    is_causal,
    never_causal,
    normal,
    outputs,
    thinned,
)
from tests.numerics import BFLOAT16_LAYER, FLOAT32, random_pieces, relative_error

V, C = 50, SMALL["chunk_size"]
CAUSAL = [case for case in thinned(MIXERS) if is_causal(*case.values)]
STREAMS = [c for c in CAUSAL if not c.values[0](**c.values[1]).obstacle]
each_stream = pytest.mark.parametrize(arguments, STREAMS)
each_other = pytest.mark.parametrize(arguments, [c for c in thinned(MIXERS) if c.values[0](**c.values[1]).obstacle])
plain = [c for c in cases(MIXERS, changed=False) if not c.values[0](**c.values[1]).obstacle]
each_plain = pytest.mark.parametrize(arguments, plain)
some_plain = pytest.mark.parametrize(arguments, tiers.of_kinds(plain, "flash", "gau", "gla", "mamba"))
DECODERS = [kind for kind in MIXERS.names() if not never_causal(MIXERS.get(kind))]
KEPT = ("flash", "gau")  # a state of a constant size, and one that grows
each_mixer = pytest.mark.parametrize("kind", DECODERS)
one_of_each_state = pytest.mark.parametrize("kind", tiers.thinned(DECODERS, *KEPT))


def start(layer, rows=B):
    return layer.initial_state(rows, N if layer.grows else None)


def extender(part):
    """`part.extend` of arrays; compiled for single tokens, as in a loop."""
    many = on_jax_compiled(lambda x, state, valid: part.extend(x, state, valid=valid))
    one = compiled(lambda x, state, valid: part.extend(x, state, valid=valid))

    def extend(x, state, valid=None, **options):
        x = ops.convert_to_tensor(x)
        if x.shape[1] == 1 and not options:
            valid = ops.ones((x.shape[0],), "int32") if valid is None else ops.convert_to_tensor(valid, "int32")
            y, state = one(x, state, valid)
        else:
            valid = None if valid is None else ops.convert_to_tensor(valid, "int32")
            y, state = part.extend(x, state, valid=valid, **options) if options else many(x, state, valid)
        return to_numpy(y), state

    return extend


def pieced(part, x, state, pieces):
    extend, found = extender(part), []
    for first, last in pieces:
        y, state = extend(x[:, first:last], state)
        found.append(y)
    return np.concatenate(found, axis=1), state


def assert_same(got, want, error=FLOAT32):
    assert got.keys() == want.keys()
    for name in want:
        assert relative_error(to_numpy(got[name]), to_numpy(want[name])) <= error, name


# The kernels' own streams are all in the default tier, and single tokens of the other layers below.
@pytest.mark.parametrize(
    arguments,
    tiers.of_kinds(STREAMS, "flash", "gau", "linear_attention", "retention"),
)
def test_a_mixer_fed_in_random_pieces_equals_the_whole(cls, options):
    layer, x = built(cls, options), normal(B, N, D)
    got, _ = pieced(layer, x, start(layer), random_pieces(1))
    assert relative_error(got, outputs(layer, x)) < FLOAT32


@pytest.mark.one_backend
@some_plain
def test_rows_of_a_mixer_take_different_numbers_of_tokens(cls, options):
    layer, x, rng = built(cls, options), normal(B, N, D), np.random.default_rng(3)
    want, extend = outputs(layer, x), extender(layer)
    state, filled = start(layer), np.zeros(B, int)
    for k in (5, 1, 19, 1, 1, 5, 19, 1):
        valid = np.minimum(rng.integers(0, k + 1, B), N - filled)
        piece = 1e4 * normal(B, k, D, seed=4)  # garbage wherever no real token is written over it
        for row, (first, count) in enumerate(zip(filled, valid, strict=True)):
            piece[row, :count] = x[row, first : first + count]
        y, state = extend(piece, state, valid)
        for row, (first, count) in enumerate(zip(filled, valid, strict=True)):
            assert relative_error(y[row, :count], want[row, first : first + count]) < FLOAT32, (row, first, count)
        filled += valid
    assert len(set(filled)) == B
    for row in range(B):
        _, alone = extend(x[[row], : filled[row]], start(layer, 1))
        assert_same({name: value[row : row + 1] for name, value in state.items()}, alone)


@pytest.mark.one_backend
@some_plain
@pytest.mark.parametrize("k", tiers.thinned([1, 5], 1))
def test_tokens_that_are_not_real_leave_the_state_bit_for_bit(cls, options, k):
    layer = built(cls, options)
    extend = extender(layer)
    for filled in (C + 3, 2 * C - 1, 2 * C):
        _, before = extend(normal(B, filled, D), start(layer))
        _, after = extend(1e4 * normal(B, k, D, seed=2), before, valid=[0] * B)
        assert_same(after, before, error=0)


@pytest.mark.one_backend
@pytest.mark.parametrize(arguments, tiers.of_kinds(STREAMS, "flash", "flash_weighted", "gau", "gla", "mamba"))
def test_single_tokens_with_what_is_prepared_once_equal_the_whole(cls, options):
    layer, x = built(cls, options), normal(B, N, D)

    def step(x, state, precomputed):
        y, state = layer.extend(x, state, precomputed=precomputed)
        return y, layer.flush([state])[0]

    step, state, found = compiled(step), start(layer), []
    precomputed = layer.precompute(state)
    for i in range(2 * C + 1):
        y, state = step(ops.convert_to_tensor(x[:, i : i + 1]), state, precomputed)
        found.append(to_numpy(y))
    assert relative_error(np.concatenate(found, axis=1), outputs(layer, x)[:, : 2 * C + 1]) < FLOAT32
    assert_same(state, layer.extend(ops.convert_to_tensor(x[:, : 2 * C + 1]), start(layer))[1])


@pytest.mark.one_backend
@pytest.mark.parametrize(arguments, tiers.of_kinds(plain, "flash", "gau", "linear_attention", "self_attention"))
def test_positions_may_be_given(cls, options):
    layer, x = built(cls, options), normal(B, N, D)
    positions = np.broadcast_to(np.cumsum(np.arange(N) % 3 + 1), (B, N)).astype("int32")
    extend, state, found = extender(layer), start(layer), []
    for first, last in random_pieces(0):
        y, state = extend(x[:, first:last], state, positions=ops.convert_to_tensor(positions[:, first:last]))
        found.append(y)
    assert relative_error(np.concatenate(found, axis=1), outputs(layer, x, positions=positions)) < FLOAT32


@each_stream
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@tiers.full_on_jax
def test_the_state_of_a_mixer_has_the_bytes_that_it_says(cls, options, policy):
    layer = built(cls, options, policy)
    said = {n: layer.state_bytes(n, 4 if policy == "float32" else 2) for n in (1, N)}
    assert layer.grows == (said[1] != said[N])
    state = start(layer, 3)
    assert all(x.shape[0] == 3 for x in state.values())
    assert sum(ops.convert_to_numpy(x).nbytes for x in state.values()) == 3 * said[N]


@each_other
def test_a_mixer_that_cannot_stream_says_why(cls, options):
    layer = built(cls, options)
    why = "divisor 'length'" if options.get("causal") else "not causal"
    with pytest.raises(ValueError, match=f"{cls.__name__} cannot stream: .*{why}"):
        start(layer)
    with pytest.raises(ValueError, match="cannot stream"):
        layer.extend(ops.convert_to_tensor(normal(B, 1, D)), {"position": ops.zeros((B,), "int32")})


@tiers.full_on_jax
@each_plain
def test_a_state_takes_a_capacity_exactly_where_it_grows(cls, options):
    layer = built(cls, options)
    wrong = None if layer.grows else N
    with pytest.raises(ValueError, match=f"{cls.__name__} has a state .* needs capacity.* got {wrong}"):
        layer.initial_state(B, wrong)


GATED_SOFTMAX = [  # whose caches are read in their own dtype
    pytest.param(MIXERS.get("self_attention"), {"heads": 2, "gated": True, "causal": True}, id="self_attention-gated"),
    pytest.param(
        MIXERS.get("gau"), {"key_dim": 4, "kernel": "softmax", "relative_bias": False, "causal": True}, id="gau-softmax"
    ),
]


@pytest.mark.one_backend
@pytest.mark.parametrize(arguments, [*tiers.of_kinds(plain, "flash", "gau", "gla"), *GATED_SOFTMAX])
def test_a_state_may_keep_tokens_in_a_narrower_dtype_than_the_layer_computes_in(cls, options):
    layer, x = built(cls, options), normal(B, 6, D)
    capacity = N if layer.grows else None
    state, found = layer.initial_state(B, capacity, "bfloat16"), []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        out, state = layer.extend(ops.convert_to_tensor(x[:, first:last]), state)
        found.append(to_numpy(out))
    assert relative_error(np.concatenate(found, axis=1), outputs(layer, x)) < BFLOAT16_LAYER
    with pytest.raises(
        ValueError, match="computes in float32: its state needs that or a narrower one of .*, got float64"
    ):
        layer.initial_state(B, capacity, "float64")


@pytest.mark.one_backend
@pytest.mark.parametrize(arguments, tiers.of_kinds(plain, "flash", "retention"))
def test_a_stream_takes_tokens_of_another_dtype_as_a_call_does(cls, options):
    layer = built(cls, options, "float64")
    x = ops.convert_to_tensor(normal(B, 3, D), "float32")
    got, _ = layer.extend(x, start(layer))
    assert relative_error(to_numpy(got), to_numpy(layer(x))) < FLOAT32


@pytest.mark.one_backend
@each_plain
def test_a_state_of_other_rows_is_one_clear_error(cls, options):
    layer, x = built(cls, options), ops.convert_to_tensor(normal(B, 2, D))
    for state, got in ((start(layer, B + 1), B + 1), ({}, "no such state")):
        with pytest.raises(ValueError, match=f"{cls.__name__} needs a state of initial_state for {B} rows, got {got}"):
            layer.extend(x, state)


@pytest.mark.one_backend
@each_plain
@pytest.mark.parametrize("shape", [(B, D), (B, 0, D)])
def test_the_next_tokens_of_another_shape_are_one_clear_error(cls, options, shape):
    layer = built(cls, options)
    with pytest.raises(ValueError, match=f"{cls.__name__} needs the next tokens as .* got {re.escape(str(shape))}"):
        layer.extend(np.ones(shape, "float32"), start(layer))
    with pytest.raises(ValueError, match=f"{cls.__name__} needs a state of initial_state, got NoneType"):
        layer.extend(np.ones((B, 1, D), "float32"), None)


@each_plain
def test_a_mixer_streams_only_when_it_is_built(cls, options):
    with pytest.raises(ValueError, match="must be built"):
        start(cls(**options))


def model_of(kind, **options):
    """A small language model over the mixer, with the same weights every time."""
    mixer, parameters = MIXERS.get(kind), inspect.signature(MIXERS.get(kind)).parameters
    mixed = {"type": kind, **{k: v for k, v in SMALL.items() if k in parameters}}
    feedforward = None if mixer.gated_unit else {"type": "glu"}
    small = {"vocabulary_size": V, "width": D, "depth": 2, "mixer": mixed, "feedforward": feedforward}
    model = MODELS.build({"type": "causal_lm", **small, **options})
    model.build()
    rng = np.random.default_rng(6)
    for weight in model.trainable_variables:
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * rng.normal(size=weight.shape))
    return model


def begun(model, rows=B):
    return model.initial_state(rows, N if model.mixers[0].grows else None)


def token_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape).astype("int32")


@pytest.mark.one_backend
@one_of_each_state
@pytest.mark.parametrize("norm", tiers.thinned(["scale_norm", "layer_norm"], "scale_norm"))
def test_a_model_fed_in_random_pieces_equals_the_whole(kind, norm):
    model, ids = model_of(kind, norm=norm), token_ids(B, N)
    got, _ = pieced(model, ids, begun(model), random_pieces(1))
    assert relative_error(got, to_numpy(model(ids))) < FLOAT32
    alone, _ = pieced(model, ids[:1], begun(model, 1), random_pieces(0))  # one row takes forms of its own
    assert relative_error(alone, got[:1]) < FLOAT32


@tiers.full_on_jax
@pytest.mark.parametrize(
    "positions", [{"position_embedding": "learned", "max_length": N}, {"position_embedding": None}]
)
def test_a_stream_continues_every_kind_of_positions(positions):
    model, ids = model_of("flash", **positions), token_ids(B, N)
    got, _ = pieced(model, ids, begun(model), random_pieces(1))
    assert relative_error(got, to_numpy(model(ids))) < FLOAT32


@pytest.mark.one_backend
@one_of_each_state
def test_prompts_of_different_lengths_go_on_together(kind):
    model, ids, lengths = model_of(kind), token_ids(B, N), np.array([19, 6])
    prompt = np.where(np.arange(N) < lengths[:, None], ids, V - 1)[:, :23]
    extend = extender(model)
    logits, state = extend(prompt, begun(model), valid=lengths)
    last, same = extend(prompt, begun(model), valid=lengths, last=True)
    want = to_numpy(model(ids))
    assert_same(same, state)
    for row, m in enumerate(lengths):
        assert relative_error(logits[row, :m], want[row, :m]) < FLOAT32
        assert relative_error(last[row, 0], want[row, m - 1]) < FLOAT32
    for step in range(C + 2):
        logits, state = extend(np.take_along_axis(ids, (lengths + step)[:, None], axis=1), state)
        for row, m in enumerate(lengths + step):
            assert relative_error(logits[row, 0], want[row, m]) < FLOAT32, (row, m)
    assert to_numpy(state["position"]).tolist() == (lengths + C + 2).tolist()


@one_of_each_state
@tiers.full_on_jax
def test_rows_of_a_models_state_can_be_gathered_and_go_on(kind):
    model, ids, order = model_of(kind), token_ids(B, N), [1, 1]
    _, state = extender(model)(ids[:, :19], begun(model))
    beam = {name: ops.take(x, order, axis=0) for name, x in state.items()}
    got, _ = extender(model)(ids[order, 19:24], beam)
    assert relative_error(got, to_numpy(model(ids))[order, 19:24]) < FLOAT32


@each_mixer
def test_the_state_of_a_model_is_flat_and_has_the_bytes_that_it_says(kind):
    model = model_of(kind)
    state = begun(model, 3)
    assert {name.split("/")[0] for name in state} == {"block_0", "block_1", "position"}
    assert all(x.shape[0] == 3 for x in state.values())
    assert sum(ops.convert_to_numpy(x).nbytes for x in state.values()) == 3 * model.decode_state_bytes(N, 4)


@tiers.full_on_jax
@pytest.mark.parametrize("kind", KEPT)
def test_a_layer_refuses_counts_and_states_that_it_cannot_have(kind):
    options = {name: value for name, value in SMALL.items() if name in inspect.signature(MIXERS.get(kind)).parameters}
    layer, x = built(MIXERS.get(kind), {**options, "causal": True}), ops.convert_to_tensor(normal(B, 3, D))
    state = start(layer)
    for valid, said in (
        (np.full(B, 4), "got 3 tokens a row: valid needs 0 to 3, got 4 to 4"),
        (np.full(B, -1), "valid needs 0 to 3, got -1 to -1"),
        (np.ones(1, "int32"), f"needs valid as integers, one for each of {B} rows, got int32 .1."),
        (np.ones((B, 3), bool), f"needs valid as integers, one for each of {B} rows, got bool"),
    ):
        with pytest.raises(ValueError, match=said):
            layer.extend(x, state, valid=valid)
    want, _ = layer.extend(x, state, valid=np.full(B, 2, "int32"))
    got, _ = layer.extend(x, state, valid=ops.full((B,), 2, "int64"))
    assert np.array_equal(to_numpy(got), to_numpy(want))
    with pytest.raises(ValueError, match="needs a state of its own, with no other, got other"):
        layer.extend(x, {**state, "other": state["position"]})
    name = next(name for name, entry in state.items() if len(entry.shape) > 2)
    with pytest.raises(ValueError, match=f"needs a state of its own, with {name} .b, "):
        layer.extend(x, {**state, name: state[name][..., 1:]})


@tiers.full_on_jax
def test_a_model_refuses_a_state_that_it_cannot_have():
    with pytest.raises(ValueError, match="GatedAttentionUnit has a state that grows with the text: it needs capacity"):
        model_of("gau").initial_state(B)
    with pytest.raises(ValueError, match="MixedChunkAttention .* capacity None, got 40"):
        model_of("flash").initial_state(B, 40)
    with pytest.raises(ValueError, match="cannot stream: divisor 'length'"):
        model_of("gau", mixer={"type": "gau", "divisor": "length"}).initial_state(B, N)
    model = model_of("flash")
    with pytest.raises(ValueError, match="got 3 tokens a row: valid needs 0 to 3, got"):
        model.extend(token_ids(B, 3), model.initial_state(B), valid=ops.full((B,), 9, "int32"))
    assert model.extend([[1, 2]], model.initial_state(1))[0].shape == (1, 2, V)
    learned = model_of("gau", position_embedding="learned", max_length=9)
    with pytest.raises(ValueError, match="causal_lm.* reads at most 9 tokens a row, got capacity 10"):
        learned.initial_state(B, 10)
    with pytest.raises(ValueError, match="room for 9 tokens a row, got rows of 0 and 10 more"):
        learned.extend(ops.convert_to_tensor(token_ids(B, 10)), learned.initial_state(B, 9))


COSFORMER = {"type": "linear_attention", "features": "relu", "cosine_length": 9, "rotary": False}


@pytest.mark.parametrize(
    "options",
    [
        {"position_embedding": "learned", "max_length": 9},
        {"mixer": COSFORMER},
        {"mixer": [{"type": "parallel", "mixers": [COSFORMER, {"type": "diag_attention", "chunk_size": 4}]}]},
    ],
    ids=["learned", "cosformer", "parallel"],
)
@tiers.full_on_jax
def test_a_model_reads_no_more_tokens_than_its_longest_text(options):
    model, ids = model_of("flash", depth=1, **options), token_ids(B, 9)
    assert model.longest == 9 and model_of("flash").longest is None
    _, state = model.extend(ops.convert_to_tensor(ids), model.initial_state(B))
    with pytest.raises(ValueError, match="reads at most 9 tokens a row, got rows of 9 and 1 more"):
        model.extend(ops.convert_to_tensor(ids[:, :1]), state)
    prompt = ids[0, :4].tolist()
    assert len(model.generate([prompt], 5)[0]) == 5
    with pytest.raises(ValueError, match="reads at most 9 tokens, got a prompt of 4 and max_new_tokens=6"):
        model.generate([prompt], 6)


@tiers.full_on_jax
def test_a_block_streams_around_a_layer_of_another_dtype():
    mixer = MixedChunkAttention(chunk_size=8, key_dim=16, causal=True, dtype="mixed_bfloat16")
    block, x = ResidualBlock(mixer), tensors({"x": normal(B, 5, D)}, "float32")["x"]
    whole = block(x)
    y, _ = block.extend(x, block.initial_state(B))
    assert y.dtype == whole.dtype
    assert relative_error(to_numpy(y), to_numpy(whole)) < BFLOAT16_LAYER


def test_a_block_around_a_layer_that_sees_each_token_alone_has_no_state():
    block, x = ResidualBlock(GLU()), tensors({"x": normal(B, 5, D)}, "float32")["x"]
    block.build((B, 5, D))
    y, state = block.extend(x, block.initial_state(B))
    assert state == {}
    assert relative_error(to_numpy(y), to_numpy(block(x))) < FLOAT32


class Blur(keras.layers.Layer):
    """A mixer that a user wrote, without a state."""

    def call(self, x, **given):
        return x + ops.roll(x, 1, axis=1)


def test_a_block_does_not_stream_around_a_layer_that_may_read_other_tokens():
    block, x = ResidualBlock(Blur()), ops.ones((B, 5, D))
    block(x)
    for read in (lambda: block.initial_state(B), lambda: block.extend(x, {})):
        with pytest.raises(ValueError, match="needs initial_state and extend, or tokenwise = True .*, got Blur"):
            read()
