"""What every kernel must satisfy, on every backend. A new file in kernels_xla/ is tested here without edits."""

import functools
import inspect

import keras
import numpy as np
import pytest
from keras import ops

import kernels_xla
from kernels_xla.common.chunking import GROUP
from tests import backends, numerics, oracles, tiers
from tests.backends import compiled, once, start, tensors, to_numpy, value_and_gradients
from tests.numerics import FLOAT32, SIZES, at, errors, inputs, masks, real_tokens, relative_error, rows, tokens
from tests.oracles import ORACLES

CASES = [(spec.of(case), case) for name, spec in kernels_xla.specs().items() for case in oracles.CASES[name]]
B, N = SIZES["b"], SIZES["n"]
LAYOUTS = {"whole": None, "padded": "padding_mask", "packed": "segment_ids"}  # and the mask that each needs


def name_of(spec, case):
    return "-".join([spec.name, *(f"{k}={v}" for k, v in case.items())])


def can_stream(spec, case):
    return spec.stream is not None and spec.stream.supports(case)


def chosen(kernel):
    """The case that stands for a kernel: the first that is causal if one is, in short chunks if it has chunks."""
    found = [case for spec, case in CASES if spec.name == kernel]
    return max(found, key=lambda case: (case.get("causal", False), "chunk_size" in case, -case.get("chunk_size", 0)))


CHOSEN = {kernel: chosen(kernel) for kernel in kernels_xla.specs()}
# Kernels whose operators XLA may lack or compile otherwise: loops, sorts, gathers, an inverse, gradients by hand. The
# others are sums of products, which the tests on JAX compile as well.
UNLIKE_PRODUCTS = ("flash", "linear_attention", "selective_scan", "skyformer", "informer", "reformer", "bigbird")
STREAMS_COMPILED_ALONE = ("flash", "transformer_ls_causal", "convolution")  # layers, or JAX, compile the others' steps


def is_chosen(spec, case):
    return case == CHOSEN[spec.name]


def both_ways(spec, case):
    """Whether a case stands for its kernel, or is the first that is not causal beside one that is."""
    found = [one for other, one in CASES if other.name == spec.name and not one.get("causal", True)]
    return is_chosen(spec, case) or (case in found[:1])


def layouts(spec):
    """How `masks` may lay out the tokens of a kernel."""
    return [layout for layout, mask in LAYOUTS.items() if mask is None or mask in spec.masks]


def case_of(spec, case, layout=None, full=False):
    """Parameters of a test. On JAX, which compiles each, the default tier takes one case of a kernel, in one layout."""
    said = [] if layout is None else [layout]
    if tiers.ON_JAX:
        full = case != CHOSEN[spec.name] or layout not in (None, layouts(spec)[-1])
    marks = [pytest.mark.full] if full else []
    return pytest.param(spec, case, *said, id="-".join([name_of(spec, case), *said]), marks=marks)


def each(keep, default=lambda spec, case: True):
    """Parametrizes a test by the kernels and cases that `keep`; those not of the `default` tier are `full`."""
    kept = [(spec, case) for spec, case in CASES if keep(spec, case)]
    return pytest.mark.parametrize(("spec", "case"), [case_of(*both, full=not default(*both)) for both in kept])


def optional(spec):
    """The inputs that a kernel does without."""
    parameters = inspect.signature(spec.fast).parameters
    return [name for name in spec.inputs if parameters[name].default is None]


every_kernel = each(lambda spec, case: True)
one_case = each(lambda spec, case: True, is_chosen)
one_of_each_way = each(lambda spec, case: True, both_ways)
one_to_compile = each(lambda spec, case: True, lambda *both: is_chosen(*both) and both[0].name in UNLIKE_PRODUCTS)
one_chunked = each(lambda spec, case: "chunk_size" in case, both_ways)
one_causal = each(lambda spec, case: spec.tokenwise or case.get("causal"), is_chosen)
one_free_of_length = each(lambda spec, case: spec.tokenwise or can_stream(spec, case), is_chosen)
each_stream = each(can_stream)
# A normalizer has a state of its own.
one_stream = each(can_stream, lambda spec, case: is_chosen(spec, case) or case.get("normalized"))
one_stream_to_compile = each(can_stream, lambda *both: is_chosen(*both) and both[0].name in STREAMS_COMPILED_ALONE)
one_masked = each(lambda spec, case: spec.masks, both_ways)
one_packed = each(lambda spec, case: "segment_ids" in spec.masks, both_ways)
each_with_optional = each(lambda spec, case: optional(spec), both_ways)
each_with_positions = each(lambda spec, case: "positions" in spec.inputs)


def call(function, case, *given, **options):
    return backends.call(once(function, **case), {}, *given, **options)


def differentiate(function, case, *given, **options):
    return backends.differentiate(once(function, **case), {}, *given, **options)


def extend(spec, case, *given, **options):
    return backends.extend(once(spec.stream.extend, **case), *given, **options)


@functools.cache
def _exact(name, layout, dtype):
    spec, case = next(both for both in CASES if name_of(*both) == name)
    return differentiate(spec.reference, case, inputs(spec), masks(layout), dtype)


def exact(spec, case, layout="whole", dtype="float64"):
    """The output of the reference and its gradients for `inputs(spec)`, computed once."""
    return _exact(name_of(spec, case), layout, dtype)


def each_layout(kept, default):
    """Parametrizes a test by the kernels, their cases, and the layouts among `kept` that they take.

    The default tier takes a case and layout if `default(spec, case, whether it is the last layout)` is true.
    """
    found = []
    for spec, case in CASES:
        taken = [layout for layout in layouts(spec) if layout in kept]
        found += [case_of(spec, case, layout, full=not default(spec, case, layout == taken[-1])) for layout in taken]
    return pytest.mark.parametrize(("spec", "case", "layout"), found)


# Of a case that does not stand for its kernel the last layout, packed rows with holes if it takes them.
every_layout = each_layout(LAYOUTS, lambda spec, case, last: last or both_ways(spec, case))


def test_every_kernel_has_an_oracle():
    assert kernels_xla.specs().keys() == ORACLES.keys()


def test_the_case_that_stands_for_a_kernel_can_be_streamed_if_one_can():
    assert {spec.name for spec, case in CASES if can_stream(spec, case)} == {
        name for name, spec in kernels_xla.specs().items() if can_stream(spec, CHOSEN[name])
    }


@tiers.full_on_jax
@every_layout
def test_the_reference_equals_the_oracle(spec, case, layout):
    arrays, masked = inputs(spec), masks(layout)
    got, want = exact(spec, case, layout)["out"], ORACLES[spec.name](**arrays, **masked, **case)
    assert relative_error(got, want) < numerics.REFERENCE[keras.backend.backend()]


@every_layout
def test_the_inputs_leave_no_output_and_no_gradient_dead(spec, case, layout):
    want = exact(spec, case, layout)
    alive = {name: np.count_nonzero(x) / x.size for name, x in want.items()}
    assert min(alive.values()) > numerics.ALIVE, alive


@every_layout
def test_fast_equals_the_reference_in_value_and_every_gradient(spec, case, layout):
    found = errors(differentiate(spec.fast, case, inputs(spec), masks(layout)), exact(spec, case, layout))
    assert max(found.values()) < FLOAT32, found


@pytest.mark.one_backend
@every_kernel
def test_fast_equals_the_oracle_at_any_length(spec, case):
    c = case.get("chunk_size", 1)
    for n in sorted({1, c - 1, c, c + 1, N} - {0}):
        arrays = inputs(spec, n=n)
        error = relative_error(call(spec.fast, case, arrays), ORACLES[spec.name](**arrays, **case))
        assert error < FLOAT32, f"n={n}: {error}"


@tiers.full_on_jax
@one_chunked
@pytest.mark.parametrize("ends", [pytest.param(0, id="whole", marks=pytest.mark.full), pytest.param(-1, id="masked")])
def test_fast_equals_the_reference_over_more_than_one_group_of_chunks(spec, case, ends):
    n, layout = 2 * GROUP + 9, layouts(spec)[ends]  # sums over chunks go in groups
    arrays, masked, case = inputs(spec, b=1, n=n), masks(layout, b=1, n=n), {**case, "chunk_size": 2}
    got = differentiate(spec.fast, case, arrays, masked)
    found = errors(got, differentiate(spec.reference, case, arrays, masked, "float64"))
    assert max(found.values()) < FLOAT32, found


@tiers.full_on_jax
@one_of_each_way
def test_bfloat16_loses_at_most_twice_what_the_reference_loses(spec, case):
    want = exact(spec, case)
    lost = errors(differentiate(spec.fast, case, inputs(spec), dtype="bfloat16"), want)
    unavoidable = errors(exact(spec, case, dtype="bfloat16"), want)
    # Over all of them, because the reference may be lucky with the few numbers of one parameter's gradient.
    total, bound = (
        np.linalg.norm(list(lost.values())),
        numerics.BFLOAT16_FACTOR * np.linalg.norm(list(unavoidable.values())),
    )
    assert total <= bound, (lost, unavoidable)


@each_with_positions
def test_far_positions_cost_bfloat16_only_the_rounding_of_the_result(spec, case):
    arrays = inputs(spec, first_position=100_000)  # bfloat16 itself counts up to 256
    rounded = {name: to_numpy(x) for name, x in tensors(arrays, "bfloat16").items()}
    got = call(spec.fast, case, arrays, dtype="bfloat16")
    assert relative_error(got, ORACLES[spec.name](**rounded, **case)) < numerics.BFLOAT16


@pytest.mark.one_backend
@one_to_compile
def test_xla_compiles_to_the_same_value_and_gradients(spec, case):
    layout, whole = layouts(spec)[-1], compiled(functools.partial(spec.fast, **case))
    found = errors(backends.differentiate(whole, {}, inputs(spec), masks(layout)), exact(spec, case, layout))
    assert max(found.values()) < FLOAT32, found


@pytest.mark.full
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="AutoGraph is TensorFlow's")
@one_case
def test_autograph_of_a_callers_own_function_changes_no_value(spec, case):
    import tensorflow as tf

    got = backends.call(tf.function(functools.partial(spec.fast, **case)), {}, inputs(spec))
    assert relative_error(got, exact(spec, case)["out"]) < FLOAT32


@pytest.mark.one_backend
@one_causal
def test_no_output_has_a_gradient_from_a_later_token(spec, case):
    # The batch is one text n times over. Row i differentiates token i alone, so its gradient is row i of the Jacobian.
    arrays = rows(spec, inputs(spec, b=1), [0] * N)
    _, gradients = value_and_gradients(
        once(spec.fast, **case),
        tensors(arrays, "float32"),
        lambda shape: at(np.eye(N, dtype=bool), np.random.default_rng(1).normal(size=shape)),
    )
    for name, jacobian in gradients.items():
        if "n" in spec.inputs[name]:
            leak = at(np.triu(np.ones([N, N], bool), k=1), to_numpy(jacobian))
            assert np.array_equal(leak, np.zeros_like(leak)), name


@pytest.mark.one_backend
@one_free_of_length
def test_a_prefix_gives_the_same_outputs_as_the_whole(spec, case):
    whole = call(spec.fast, case, inputs(spec))
    for m in (1, 5, 19):
        prefix = call(spec.fast, case, tokens(spec, inputs(spec), 0, m))
        assert relative_error(prefix, whole[:, :m]) < FLOAT32, m


@each_with_optional
def test_an_optional_parameter_left_out_equals_zeros(spec, case):
    arrays = inputs(spec)
    zeros = {name: np.zeros_like(arrays[name]) for name in optional(spec)}
    without = {name: x for name, x in arrays.items() if name not in zeros}
    for function in (spec.fast, spec.reference):
        assert relative_error(call(function, case, without), call(function, case, {**arrays, **zeros})) < FLOAT32


@each_layout(
    ("padded", "packed"), lambda spec, case, last: last and both_ways(spec, case)
)  # packed rows have holes too
def test_padding_changes_no_output_and_gets_no_gradient(spec, case, layout):
    masked = masks(layout)
    real, clean = real_tokens(masked), inputs(spec)
    want = differentiate(spec.fast, case, clean, masked)
    of_tokens = [name for name, axes in spec.inputs.items() if "n" in axes]
    for size in (1, 1e4):
        garbage = {name: at(~real, size * inputs(spec, seed=2)[name]) for name in of_tokens}
        dirty = {name: x + garbage.get(name, 0) for name, x in clean.items()}
        got = differentiate(spec.fast, case, dirty, masked)
        for name in got:
            assert np.array_equal(got[name], want[name]), (name, size)
        for name in of_tokens:
            assert not at(~real, got[f"d{name}"]).any(), (name, size)


@pytest.mark.one_backend
@one_masked
def test_padding_on_the_right_equals_a_shorter_text(spec, case):
    arrays, lengths = inputs(spec), [19, 5]
    mask = np.arange(N) < np.array(lengths)[:, None]
    got = call(spec.fast, case, arrays, {"padding_mask": mask})
    for row, m in enumerate(lengths):
        alone = call(spec.fast, case, tokens(spec, rows(spec, arrays, [row]), 0, m))
        assert relative_error(got[[row], :m], alone) < FLOAT32


@one_masked
@tiers.full_on_jax
def test_a_row_of_padding_gives_zeros_and_finite_gradients(spec, case):
    # If causal, the first tokens of the second row have no key either.
    arrays, mask = inputs(spec), np.stack([np.zeros(N, bool), np.arange(N) >= 5])
    out = call(spec.fast, case, arrays, {"padding_mask": mask})
    assert not out[0].any() and np.isfinite(out).all()
    given = tensors({**arrays, "padding_mask": mask}, "float32")
    _, gradients = value_and_gradients(once(spec.fast, **case), given, np.ones)
    assert all(np.isfinite(to_numpy(x)).all() for x in gradients.values())


@pytest.mark.one_backend
@one_packed
def test_packed_documents_equal_themselves_alone(spec, case):
    c = spec.model_chunk(case) if spec.model_chunk(case) > 1 else 5
    starts, lengths = [0, 3 * c, 4 * c], [2 * c + 1, c, 3 * c - 1]  # what is between two documents is padding
    arrays, segment_ids = inputs(spec, n=7 * c), np.zeros([B, 7 * c], "int32")
    for name, first, length in zip((5, 2, 9), starts, lengths, strict=True):
        segment_ids[:, first : first + length] = name
    packed = call(spec.fast, case, arrays, {"segment_ids": segment_ids})
    for first, length in zip(starts, lengths, strict=True):
        alone = call(spec.fast, case, tokens(spec, arrays, first, first + length))
        assert relative_error(packed[:, first : first + length], alone) < FLOAT32


@one_stream
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
@tiers.full_on_jax
def test_a_stream_in_random_pieces_equals_the_whole(spec, case, dtype):
    arrays = inputs(spec)
    want, bound = exact(spec, case)["out"], FLOAT32
    if dtype == "bfloat16":
        bound = numerics.BFLOAT16_FACTOR * relative_error(exact(spec, case, dtype=dtype)["out"], want)
    for seed in range(2):
        state, outs = start(spec, case, B, N, dtype), []
        for first, last in numerics.random_pieces(seed):
            out, state = extend(spec, case, state, tokens(spec, arrays, first, last), dtype=dtype)
            outs.append(out)
        assert relative_error(np.concatenate(outs, axis=1), want) < bound, seed


@tiers.full_on_jax
@one_stream
def test_rows_of_a_stream_take_different_numbers_of_tokens(spec, case):
    arrays, rng = inputs(spec), np.random.default_rng(3)
    want = exact(spec, case)["out"]
    state, filled = start(spec, case, B, N), np.zeros(B, int)
    for k in (5, 1, 19, 1, 5, 19, 5, 1):
        valid = np.minimum(rng.integers(0, k + 1, B), N - filled)
        piece = inputs(spec, n=k, seed=4)  # garbage wherever no real token is written over it
        piece = {name: x if "n" in spec.inputs[name] else arrays[name] for name, x in piece.items()}
        for row, (first, count) in enumerate(zip(filled, valid, strict=True)):
            for name in (name for name in piece if "n" in spec.inputs[name]):
                piece[name][row, :count] = arrays[name][row, first : first + count]
        out, state = extend(spec, case, state, piece, valid)
        for row, (first, count) in enumerate(zip(filled, valid, strict=True)):
            assert relative_error(out[row, :count], want[row, first : first + count]) < FLOAT32, (row, first, count)
        filled += valid
    assert len(set(filled)) == B
    for row in range(B):
        _, alone = extend(spec, case, start(spec, case, 1, N), rows(spec, tokens(spec, arrays, 0, filled[row]), [row]))
        for name in alone:
            assert relative_error(to_numpy(state[name])[[row]], to_numpy(alone[name])) < FLOAT32, (row, name)


@one_stream
@tiers.full_on_jax
def test_a_step_without_real_tokens_leaves_the_state_bit_for_bit(spec, case):
    arrays = inputs(spec)
    _, before = extend(spec, case, start(spec, case, B, N), tokens(spec, arrays, 0, 19))
    garbage = {name: x * 1e4 if "n" in spec.inputs[name] else x for name, x in tokens(spec, arrays, 19, 24).items()}
    _, after = extend(spec, case, before, garbage, valid=[0] * B)
    assert before.keys() == after.keys()
    for name in before:
        assert np.array_equal(to_numpy(after[name]), to_numpy(before[name])), name


@tiers.full_on_jax
@one_stream
def test_rows_of_a_stream_can_be_gathered_and_go_on(spec, case):
    arrays, order = inputs(spec), [1, 1]
    _, state = extend(spec, case, start(spec, case, B, N), tokens(spec, arrays, 0, 19))
    beam = {name: ops.take(x, order, axis=0) for name, x in state.items()}
    got, _ = extend(spec, case, beam, tokens(spec, rows(spec, arrays, order), 19, 24))
    assert relative_error(got, exact(spec, case)["out"][order, 19:24]) < FLOAT32


@pytest.mark.one_backend
@one_stream_to_compile
def test_a_step_of_a_stream_compiles_under_xla(spec, case):
    arrays = inputs(spec)
    _, state = extend(spec, case, start(spec, case, B, N), tokens(spec, arrays, 0, 19))
    piece, valid = tensors(tokens(spec, arrays, 19, 24), "float32"), ops.convert_to_tensor([5, 2], dtype="int32")
    step = compiled(lambda state, valid, piece: spec.stream.extend(state, valid=valid, **piece, **case))
    out, after = step(state, valid, piece)
    want, eager = spec.stream.extend(state, valid=valid, **piece, **case)
    assert relative_error(to_numpy(out)[0], to_numpy(want)[0]) < FLOAT32
    for name in eager:
        assert relative_error(to_numpy(after[name]), to_numpy(eager[name])) < FLOAT32, name


@each_stream
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@tiers.full_on_jax
def test_a_state_has_the_bytes_that_its_spec_says(spec, case, dtype):
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    said = {n: spec.state_bytes({**SIZES, "n": n}, case, itemsize) for n in (N, 1_000, 100_000)}
    for n in said if said[1_000] == said[100_000] else [N]:
        state = start(spec, case, B, n, dtype)
        assert all(x.shape[0] == B for x in state.values())
        assert sum(ops.convert_to_numpy(x).nbytes for x in state.values()) == said[n], n
