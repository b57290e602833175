"""A layer is one function, whichever accelerator it is traced for."""

import re

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers.scaled_sin import ScaledSinusoidalEmbedding
from kernels_xla.common.accelerator import on_tpu, tracing_for
from kernels_xla.common.rotary import SPEC, rope_tables, rotary
from kernels_xla.softmax_attention import softmax_attention
from tests import backends, tiers
from tests.backends import differentiate, tensors, to_numpy, value_and_gradients
from tests.contracts.test_mixers import FEEDFORWARDS, MIXERS, B, D, N, packs, thinned
from tests.numerics import FLOAT32, inputs, masks, relative_error
from tests.oracles import CASES

ACCELERATORS = ("gpu", "tpu")


def traced_for_each(function):
    results = []
    for accelerator in ACCELERATORS:
        with tracing_for(accelerator):
            results.append(function())
    return results


def gradients(layer, masked, shape=(B, N)):
    """The output and the gradient of the input and of every weight."""
    rng = np.random.default_rng(0)
    weights = {str(i): ops.convert_to_tensor(w.value) for i, w in enumerate(layer.trainable_variables)}
    given = tensors({"x": rng.normal(size=(*shape, D))}, "float32")
    frozen = [ops.convert_to_tensor(w.value) for w in layer.non_trainable_variables]

    def call(x, **weights):
        return layer.stateless_call([weights[str(i)] for i in range(len(weights))], frozen, x, **masked)[0]

    out, found = value_and_gradients(call, {**given, **weights}, lambda shape: np.ones(shape))
    return [to_numpy(out), *(to_numpy(found[name]) for name in sorted(found))]


# Those whose kernels or projections have a form of their own on a TPU: softmax, joint softmax, rotation, split parts.
TELLING = ("flash", "flash_weighted", "gau", "self_attention", "linear_attention", "combiner", "mamba")


@pytest.mark.parametrize(("cls", "case"), tiers.of_kinds(thinned(MIXERS) + thinned(FEEDFORWARDS), *TELLING, "glu"))
def test_a_layer_traced_for_a_tpu_equals_the_same_traced_for_a_gpu(cls, case):
    backends.seed(0)
    layer = cls(**case)
    layer.build((None, None, D))
    masked = tensors(masks("packed" if packs(layer) else "padded", B, N), "float32")
    for gpu, tpu in zip(*traced_for_each(lambda: gradients(layer, masked)), strict=True):
        assert relative_error(tpu, gpu) < FLOAT32


@pytest.mark.parametrize("shape", [(1, 16), (3, 16), (1, 13)], ids=str)
@pytest.mark.parametrize("name", ["flash", "flash_weighted", "gau"])
def test_so_is_it_of_one_row_of_many_and_of_whole_chunks(name, shape):
    backends.seed(0)
    layer = MIXERS.get(name)(key_dim=16, **({} if name == "gau" else {"chunk_size": 4}))
    layer.build((None, None, D))
    for gpu, tpu in zip(*traced_for_each(lambda: gradients(layer, {}, shape)), strict=True):
        assert relative_error(tpu, gpu) < FLOAT32


def test_a_model_whose_rows_and_lengths_are_unknown_can_be_made_on_a_tpu():
    layer = MIXERS.get("flash")(chunk_size=4, key_dim=16)
    x = tensors({"x": np.random.default_rng(0).normal(size=(1, 13, D))}, "float32")["x"]
    with tracing_for("tpu"):
        model = keras.Sequential([keras.Input((None, D)), layer])
        found = to_numpy(model(x))
    assert relative_error(found, to_numpy(layer(x))) < FLOAT32


@pytest.mark.parametrize("case", CASES["rotary"], ids=str)
def test_rotary_and_its_gradient_are_the_same_in_both_forms(case):
    arrays = inputs(SPEC)
    gpu, tpu = traced_for_each(lambda: differentiate(rotary, case, arrays))
    for name, expected in gpu.items():
        assert relative_error(tpu[name], expected) < FLOAT32


def test_a_tpu_gets_tables_as_wide_as_the_heads():
    positions = ops.arange(5)[None]
    with tracing_for("tpu"):
        assert [tuple(x.shape) for x in rope_tables(positions, 8)] == [(1, 5, 8)] * 2
    with tracing_for("gpu"):
        assert [tuple(x.shape) for x in rope_tables(positions, 8)] == [(1, 5, 4)] * 2


@pytest.mark.one_backend
def test_nothing_parts_a_tpus_largest_score_from_the_exponentials_that_it_fuses_with():
    import tensorflow as tf

    attention = tf.function(lambda *arrays: softmax_attention(*arrays), jit_compile=True, autograph=False)
    with tracing_for("tpu"):
        program = attention.experimental_get_compiler_ir(*[tf.TensorSpec((1, 64, 2, 8))] * 3)(stage="hlo")
    entry = program[program.index("ENTRY") :]
    passes = sorted(re.findall(r" (dot|reduce|maximum|exponential|divide)\(", entry))
    assert passes == ["divide", "dot", "dot", "exponential", "reduce", "reduce"]  # of `maximum` libtpu makes one more


def test_a_quantized_projection_stays_whole_on_a_tpu():
    layer = MIXERS.get("flash")(chunk_size=8, key_dim=16)
    layer.build((None, None, D))
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(B, N, D)), "float32")
    layer.in_projection.quantize("int8")
    gpu, tpu = traced_for_each(lambda: to_numpy(layer(x)))
    assert relative_error(tpu, gpu) < FLOAT32


def test_a_low_rank_update_reaches_the_parts_of_a_projection():
    layer = MIXERS.get("flash")(chunk_size=8, key_dim=16)
    layer.build((None, None, D))
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(B, N, D)), "float32")
    before = to_numpy(layer(x))
    layer.in_projection.enable_lora(2)
    layer.in_projection.lora_kernel_b.assign(np.ones(layer.in_projection.lora_kernel_b.shape))
    gpu, tpu = traced_for_each(lambda: to_numpy(layer(x)))
    assert relative_error(tpu, gpu) < FLOAT32 < relative_error(gpu, before)


def test_the_innermost_choice_holds_and_ends_with_its_block():
    assert not on_tpu()  # no machine that runs this has one
    with tracing_for("tpu"):
        assert on_tpu()
        with tracing_for("gpu"):
            assert not on_tpu()
        assert on_tpu()
    assert not on_tpu()
    with pytest.raises(ValueError, match="tracing_for takes 'tpu', 'gpu' or 'lite', got 'cpu'"), tracing_for("cpu"):
        pass


def test_absolute_positions_of_packed_rows_are_those_of_single_ones():
    layer = ScaledSinusoidalEmbedding(8)
    packed = to_numpy(layer(ops.convert_to_tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])))
    alone = to_numpy(layer(ops.arange(5)[None]))[0]
    assert relative_error(packed, [alone[[0, 1, 2, 0, 1]], alone]) < FLOAT32  # a CPU rounds the end of a row otherwise
