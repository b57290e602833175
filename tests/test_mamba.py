"""Mamba where its decays are extreme and its lengths unknown, what it keeps in memory, and how it starts."""

import functools
import math
import re

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import Mamba
from kernels_xla.mamba import selective_scan
from tests import tiers
from tests.backends import call, differentiate, tensors, to_numpy
from tests.numerics import FLOAT32, SIZES, errors, inputs, relative_error
from tests.oracles import ORACLES

SPEC, ORACLE = selective_scan.SPEC, ORACLES["selective_scan"]
CAUSAL = {"causal": True}
of_tensorflow = pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX knows every length")


@pytest.mark.parametrize("sizes", [{"chunk_size": 1}, {"chunk_size": 24}, {"channels": 1}, {"channels": 6}, {}])
def test_chunks_and_groups_are_of_the_implementation_and_not_of_the_function(sizes):
    arrays = inputs(SPEC)
    assert relative_error(call(SPEC.fast, {**CAUSAL, **sizes}, arrays), ORACLE(**arrays)) < FLOAT32


@pytest.mark.parametrize("log_decay", [-8.0, -1000.0, 0.0])
def test_the_strongest_and_the_weakest_decay_are_exact_and_have_finite_gradients(log_decay):
    arrays = inputs(SPEC)
    arrays["dt"], arrays["a"] = np.full_like(arrays["dt"], 0.5), np.full_like(arrays["a"], 2 * log_decay)
    got = differentiate(SPEC.fast, CAUSAL, arrays)
    want = differentiate(SPEC.reference, CAUSAL, arrays, dtype="float64")
    assert relative_error(got["out"], ORACLE(**arrays)) < FLOAT32
    # Of the gradient of decays so strong nothing is left in float32.
    found = {name: error for name, error in errors(got, want).items() if name != "da" or log_decay > -1000}
    assert max(found.values()) < FLOAT32, found
    assert np.isfinite(got["da"]).all()


@of_tensorflow
@pytest.mark.parametrize("xla", tiers.thinned([False, True], False))
def test_a_length_that_is_known_only_at_run_time_gives_the_same_value_and_gradients(xla):
    import tensorflow as tf

    def function(arrays, segment_ids):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            out = SPEC.fast(**arrays, chunk_size=4, channels=8, segment_ids=segment_ids)
            total = tf.reduce_sum(out**2) / 2
        return {"out": out, **{f"d{name}": x for name, x in tape.gradient(total, arrays).items()}}

    shapes = {name: [None if axis == "n" else SIZES[axis] for axis in axes] for name, axes in SPEC.inputs.items()}
    signature = {name: tf.TensorSpec(shape, tf.float32) for name, shape in shapes.items()}
    ids = tf.TensorSpec([SIZES["b"], None], tf.int32)
    traced = tf.function(function, input_signature=[signature, ids], jit_compile=xla)
    for n in (1, 37):
        arrays, segment_ids = inputs(SPEC, n=n), np.repeat([[1] * 9 + [4] * 28], SIZES["b"], axis=0)[:, :n]
        given = tensors(arrays, "float32"), tf.constant(segment_ids, tf.int32)
        got, want = ({name: to_numpy(x) for name, x in f(*given).items()} for f in (traced, function))
        assert max(errors(got, want).values()) < FLOAT32, n
        assert relative_error(got["out"], ORACLE(**arrays, segment_ids=segment_ids)) < FLOAT32


@of_tensorflow
def test_no_compiled_step_has_the_states_of_all_tokens_and_channels_at_once():
    import tensorflow as tf

    n, e, s, m = 64, 128, 8, 16
    arrays = tensors(inputs(SPEC, b=1, n=n, e=e, s=s), "float32")

    @functools.partial(tf.function, jit_compile=True)
    def step(arrays):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            total = tf.reduce_sum(SPEC.fast(**arrays, channels=m) ** 2)
        return total, tape.gradient(total, arrays)

    text = step.experimental_get_compiler_ir(arrays)(stage="optimized_hlo")
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    assert n * s * m <= max(sizes) <= 2 * n * s * m < n * s * e


def test_parameters_are_as_many_as_the_authors_have():
    d, e, s, rank = 1024, 2048, 16, 64
    layer = Mamba()
    layer.build((None, None, d))
    convolution, states = 4 * e + e, e * (rank + 2 * s) + (rank * e + e) + e * s + e
    assert sum(math.prod(w.shape) for w in layer.trainable_variables) == 2 * d * e + convolution + states + e * d


def test_states_start_at_the_papers_paces():
    layer = Mamba()
    layer.build((None, None, 64))
    given, _ = layer.enter(ops.zeros((1, 1, 128)), None)
    assert relative_error(to_numpy(given["a"]), np.tile(-np.arange(1.0, 17), (128, 1))) < FLOAT32
    steps = np.log10(to_numpy(given["dt"])[0, 0])
    assert relative_error(steps, np.linspace(-3, -1, 128)) < FLOAT32
    assert to_numpy(given["d"]).tolist() == [1.0] * 128


def test_steps_and_rates_are_float32_in_layers_of_bfloat16():
    layer = Mamba(dtype="mixed_bfloat16")
    layer.build((None, None, 32))
    given, _ = layer.enter(ops.ones((1, 2, 64), "bfloat16"), None)
    wide = {name for name, x in given.items() if keras.backend.standardize_dtype(x.dtype) == "float32"}
    assert wide == {"dt", "a", "d"}


def test_a_mamba_refuses_what_it_cannot_be_in_one_line():
    for option in ("state_size", "conv_width", "expansion", "dt_rank"):
        with pytest.raises(ValueError, match=f"^Mamba needs {option} >= 1, got 0$"):
            Mamba(**{option: 0})
    with pytest.raises(ValueError, match="^Mamba is causal by definition: it needs causal true, got False$"):
        Mamba(causal=False)
    arrays = tensors(inputs(SPEC), "float32")
    state = SPEC.stream.initial_state(SIZES, {}, "float32")
    for function in (SPEC.fast, functools.partial(SPEC.stream.extend, state)):
        with pytest.raises(ValueError, match="^selective_scan is causal by .* needs causal=True, got False$"):
            function(**arrays, causal=False)
