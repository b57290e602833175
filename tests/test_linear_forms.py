"""Linear attention and its decays where chunks, documents and lengths meet, and where decays are extreme."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from kernels_xla import gla, linear_attention, retention
from kernels_xla.common.recurrence import doubling, entering, fitting, running
from tests import numerics, tiers
from tests.backends import call, differentiate, once, tensors, to_numpy
from tests.numerics import FLOAT32, SIZES, errors, inputs, relative_error
from tests.oracles import ORACLES

KERNELS = [pytest.param(module.SPEC, id=module.SPEC.name) for module in (retention, gla, linear_attention)]
DECAYS = [pytest.param(module.SPEC, id=module.SPEC.name) for module in (retention, gla)]
each_kernel = pytest.mark.parametrize("spec", KERNELS)
each_decay = pytest.mark.parametrize("spec", DECAYS)
CAUSAL = {"causal": True}
ON_JAX = keras.backend.backend() == "jax"
STRONG = 70  # tokens of texts with strong decays: in chunks of 32 a decay of e^-8 is past float32 after 12 of them


def fast(spec):
    return once(spec.fast, **CAUSAL, chunk_size=32)


def reference(spec):
    return once(spec.reference, **CAUSAL)


def with_decays(arrays, log_decay):
    return {name: np.full_like(x, log_decay) if "log_decay" in name else x for name, x in arrays.items()}


@each_kernel
@tiers.full_on_jax
def test_the_chunk_is_of_the_implementation_and_not_of_the_function(spec):
    arrays = inputs(spec, n=71)
    want = ORACLES[spec.name](**arrays, **CAUSAL)
    # Of one token; cut into 8s; cut into single tokens; cut into 16s; of more than the text; the default.
    for options in (*({"chunk_size": c} for c in (1, 24, 37, 48, 1000)), {}):
        assert relative_error(call(once(spec.fast, **CAUSAL, **options), {}, arrays), want) < FLOAT32, options


@pytest.mark.parametrize("normalized", [False, True])
def test_attention_state_and_chunks_are_three_forms_of_one_function(normalized):
    case, arrays = {**CAUSAL, "normalized": normalized}, inputs(linear_attention.SPEC)
    want = call(
        linear_attention.SPEC.reference, case, arrays, dtype="float64"
    )  # attention: dense weights, the diagonal included
    chunks = call(linear_attention.SPEC.fast, {**case, "chunk_size": 8}, arrays)
    state, found = linear_attention.SPEC.stream.initial_state(SIZES, case, "float32"), []
    extend = once(linear_attention.SPEC.stream.extend, **case)
    for i in range(SIZES["n"]):
        token = {name: x[:, i : i + 1] for name, x in tensors(arrays, "float32").items()}
        out, state = extend(state, **token)
        found.append(to_numpy(out))
    assert relative_error(chunks, want) < FLOAT32
    assert relative_error(np.concatenate(found, axis=1), want) < FLOAT32


@pytest.mark.parametrize("width", [8, 16])
def test_a_state_takes_keys_as_rows_where_keys_and_values_are_of_one_width(width):
    q, k, v = (np.zeros([1, 2, 1, width]) for _ in range(3))
    k[0, 0, 0, 1], v[0, 0, 0, 2], q[0, 1, 0, 1] = 1, 5, 3  # a reader of v k^T would find nothing
    out = call(linear_attention.SPEC.fast, CAUSAL, {"q": q, "k": k, "v": v})
    assert out[0, 1, 0].tolist() == [15.0 if i == 2 else 0.0 for i in range(width)]


def test_the_weights_of_a_normalized_row_add_up_to_one():
    arrays = inputs(linear_attention.SPEC)
    for causal in (False, True):
        case = {"causal": causal, "normalized": True, "chunk_size": 8}
        out = call(once(linear_attention.SPEC.fast, **case), {}, {**arrays, "v": np.ones_like(arrays["v"])})
        assert relative_error(out, np.ones_like(out)) < FLOAT32


def test_a_token_that_sees_features_of_nothing_gets_zeros_and_finite_gradients():
    arrays = {name: x if name == "v" else np.zeros_like(x) for name, x in inputs(linear_attention.SPEC).items()}
    found = differentiate(once(linear_attention.SPEC.fast, **CAUSAL, normalized=True), {}, arrays)
    assert not found["out"].any() and all(np.isfinite(x).all() for x in found.values())


@each_decay
def test_a_decay_is_of_the_tokens_after_the_key_up_to_the_query(spec):
    arrays = {name: np.zeros_like(x) for name, x in inputs(spec, b=1, n=4, h=1).items()}
    arrays["q"][:, 3, 0, 0], arrays["k"][:, 1, 0, 0], arrays["v"][:, 1, 0, 0] = 2, 3, 5
    arrays["log_decay"][:] = np.log([0.9, 0.8, 0.7, 0.5]).reshape([1, 4] + [1] * (arrays["log_decay"].ndim - 2))
    assert call(fast(spec), {}, arrays)[0, 3, 0, 0] == pytest.approx(2 * 3 * 5 * 0.7 * 0.5, rel=FLOAT32)


@each_decay
@pytest.mark.parametrize("log_decay", [-8.0, -1000.0, 0.0])
def test_the_strongest_and_the_weakest_decay_are_exact_and_have_finite_gradients(spec, log_decay):
    arrays = with_decays(inputs(spec, n=STRONG), log_decay)
    got = differentiate(fast(spec), {}, arrays)
    want = differentiate(reference(spec), {}, arrays, dtype="float64")
    assert relative_error(got["out"], ORACLES[spec.name](**arrays)) < FLOAT32
    # Of the gradient of decays so strong nothing is left in float32.
    found = {name: error for name, error in errors(got, want).items() if "decay" not in name or log_decay > -1000}
    assert max(found.values()) < FLOAT32, found
    assert all(np.isfinite(x).all() for x in got.values())


@each_decay
def test_a_strong_decay_costs_bfloat16_no_more_than_rounding(spec):
    arrays = with_decays(inputs(spec, n=STRONG), -8.0)
    exact = call(reference(spec), {}, arrays, dtype="float64")
    lost = relative_error(call(fast(spec), {}, arrays, dtype="bfloat16"), exact)
    unavoidable = relative_error(call(reference(spec), {}, arrays, dtype="bfloat16"), exact)
    assert lost <= numerics.BFLOAT16_FACTOR * unavoidable


@each_decay
def test_decays_of_all_strengths_in_one_text_keep_what_is_near_exact(spec):
    rng, arrays = np.random.default_rng(4), inputs(spec, n=STRONG)
    for name in (name for name in arrays if "log_decay" in name):
        arrays[name] = np.float32(-(10.0 ** rng.uniform(-4, 1, arrays[name].shape))).astype("float64")
    got = differentiate(fast(spec), {}, arrays)
    want = differentiate(reference(spec), {}, arrays, dtype="float64")
    assert relative_error(got["out"], ORACLES[spec.name](**arrays)) < FLOAT32
    assert max(errors(got, want).values()) < FLOAT32


@each_kernel
def test_a_chunk_of_padding_alone_passes_the_state_of_its_document_on(spec):
    c, n = 2, 20
    mask, segment_ids = np.ones([1, n], bool), np.full([1, n], 3)
    mask[:, 2 * c : 5 * c] = False  # three chunks amid the first document
    segment_ids[:, 6 * c :] = 5
    mask[:, 6 * c : 7 * c] = False  # and one at the start of the second
    arrays, masked = inputs(spec, b=1, n=n), {"padding_mask": mask, "segment_ids": segment_ids}
    got = call(once(spec.fast, **CAUSAL, chunk_size=c), {}, arrays, masked)
    real = mask[0]
    assert relative_error(got[:, real], ORACLES[spec.name](**arrays, **masked, **CAUSAL)[:, real]) < FLOAT32
    first = [*range(2 * c), *range(5 * c, 6 * c)]
    alone = call(once(spec.fast, **CAUSAL), {}, {name: x[:, first] for name, x in arrays.items()})
    assert relative_error(got[:, first], alone) < FLOAT32


@pytest.mark.skipif(ON_JAX, reason="JAX knows every length")
@pytest.mark.parametrize("spec", tiers.of_kinds(KERNELS, "linear_attention"))
@pytest.mark.parametrize("xla", tiers.thinned([False, True], False))
def test_a_length_that_is_known_only_at_run_time_gives_the_same_value_and_gradients(spec, xla):
    import tensorflow as tf

    shapes = {name: [None if a == "n" else SIZES[a] for a in axes] for name, axes in spec.inputs.items()}

    def function(arrays, segment_ids):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = spec.fast(**arrays, **CAUSAL, chunk_size=4, segment_ids=segment_ids)
            total = tf.reduce_sum(out**2) / 2
        return {"out": out, **{f"d{name}": x for name, x in tape.gradient(total, arrays).items()}}

    signature = {name: tf.TensorSpec(shape, tf.float32) for name, shape in shapes.items()}
    traced = tf.function(
        function, input_signature=[signature, tf.TensorSpec([SIZES["b"], None], tf.int32)], jit_compile=xla
    )
    for n in (1, 37):
        arrays, segment_ids = inputs(spec, n=n), np.repeat([[1] * 9 + [4] * 28], SIZES["b"], axis=0)[:, :n]
        got = traced(tensors(arrays, "float32"), tf.constant(segment_ids, tf.int32))
        want = function(tensors(arrays, "float32"), tf.constant(segment_ids, tf.int32))
        found = errors({name: to_numpy(x) for name, x in got.items()}, {k: to_numpy(x) for k, x in want.items()})
        assert max(found.values()) < FLOAT32, (n, found)
        oracle = ORACLES[spec.name](**arrays, **CAUSAL, segment_ids=segment_ids)
        assert relative_error(to_numpy(got["out"]), oracle) < FLOAT32


def test_a_scan_over_chunks_is_the_recurrence():
    rng = np.random.default_rng(0)
    for chunks in (1, 3, 8):
        decay, x = rng.uniform(0, 1, [2, chunks, 3, 4]), rng.normal(size=[2, chunks, 3, 4, 5])
        decay[:, chunks // 2] = 0  # a document begins
        want, y = np.zeros(x.shape), 0
        for g in range(chunks):
            want[:, g] = y = decay[:, g, :, :, None] * y + x[:, g]
        got = once(running)(*tensors({"d": decay, "x": x}, "float64").values())
        assert relative_error(to_numpy(got), want) < numerics.FLOAT64
        shared = once(running)(ops.convert_to_tensor(decay[..., :1]), ops.convert_to_tensor(x))
        again = once(running)(ops.convert_to_tensor(np.repeat(decay[..., :1], 4, -1)), ops.convert_to_tensor(x))
        assert relative_error(to_numpy(shared), to_numpy(again)) < numerics.FLOAT64


def test_the_passes_of_a_scan_are_as_many_as_the_doublings_of_its_length():
    lengths = (1, 2, 3, 4, 5, 64, 65)
    count = lambda by, passes: (passes + 1,)  # noqa: E731
    assert [doubling(count, n, 0)[0] for n in lengths] == [0, 1, 2, 2, 3, 6, 7]
    for n in lengths:  # in a loop
        looped = doubling(count, ops.convert_to_tensor(n, "int32"), ops.zeros((), "int32"))[0]
        assert int(looped) == doubling(count, n, 0)[0]


def test_the_document_that_enters_a_chunk_is_that_of_the_last_real_token_before():
    last = ops.convert_to_tensor([[4, 0, 0, 7, 7, 0, 2, 0], [0, 0, 0, 0, 0, 3, 0, 1]], "int32")
    got = to_numpy(entering(last)).tolist()
    assert got == [[0, 4, 4, 4, 7, 7, 7, 2], [0, 0, 0, 0, 0, 0, 3, 3]]


def test_a_chunk_is_no_longer_than_its_text():
    assert [fitting(64, n) for n in (1, 16, 17, 63, 64, 1000, None)] == [16, 16, 32, 64, 64, 64, 64]
    assert fitting(4, 1000) == fitting(4, 1) == 4
    with pytest.raises(ValueError, match="^chunk_size must be at least 1, got 0$"):
        fitting(0, 5)


@each_decay
def test_a_decay_refuses_to_be_read_backwards_in_one_line(spec):
    arrays = tensors(inputs(spec), "float32")
    refused = r"^\w+ is causal by definition: it needs causal=True, got False$"
    state = spec.stream.initial_state(SIZES, {}, "float32")
    for function in (spec.fast, functools.partial(spec.stream.extend, state)):
        with pytest.raises(ValueError, match=refused):
            function(**arrays, causal=False)


def test_a_stream_of_linear_attention_that_is_not_causal_is_refused():
    state = linear_attention.initial_state(SIZES, {}, "float32")
    with pytest.raises(ValueError, match="linear_attention can be streamed only if causal, got causal=False"):
        linear_attention.extend(state, **tensors(inputs(linear_attention.SPEC), "float32"), causal=False)


@pytest.mark.parametrize("left_out", ["log_decay", "value_log_decay"])
def test_either_gates_alone_are_both_where_the_others_forget_nothing(left_out):
    arrays = inputs(gla.SPEC)
    none = {**arrays, left_out: np.zeros_like(arrays[left_out])}
    alone = {name: x for name, x in arrays.items() if name != left_out}
    got, want = differentiate(fast(gla.SPEC), {}, alone), differentiate(fast(gla.SPEC), {}, none)
    assert max(errors(got, {name: want[name] for name in got}).values()) < FLOAT32


def test_gates_of_values_are_gates_of_keys_of_the_state_turned_over():
    rng, n = np.random.default_rng(2), 40
    k, v, decay = rng.normal(size=[1, n, 1, 4]), rng.normal(size=[1, n, 1, 4]), rng.uniform(-1, 0, [1, n, 1, 4])
    rows = [np.broadcast_to(row, k.shape) for row in np.eye(4)]  # each query reads one row of every state
    of_values = [call(fast(gla.SPEC), {}, {"q": q, "k": k, "v": v, "value_log_decay": decay}) for q in rows]
    of_keys = [call(fast(gla.SPEC), {}, {"q": q, "k": v, "v": k, "log_decay": decay}) for q in rows]
    assert relative_error(np.stack(of_values, axis=-2), np.stack(of_keys, axis=-1)) < FLOAT32


@pytest.mark.skipif(not ON_JAX, reason="JAX counts what a compiled program computes")
@pytest.mark.parametrize("decay", ["log_decay", "value_log_decay"])
def test_the_gradient_of_gla_makes_decays_again_and_keeps_none(decay):
    import jax

    kept = {name: x for name, x in inputs(gla.SPEC, n=64).items() if "decay" not in name or name == decay}
    arrays = tensors(kept, "float32")

    def forward(arrays):
        return ops.sum(ops.square(gla.SPEC.fast(**arrays, **CAUSAL, chunk_size=32)))

    def exponentials(function):
        return jax.jit(function).lower(arrays).compile().cost_analysis()["transcendentals"]

    # Less than twice, because the decays of states are made once. If the compiler merged both passes, it would be once.
    assert exponentials(jax.value_and_grad(forward)) > 1.5 * exponentials(forward)
