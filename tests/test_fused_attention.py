"""Softmax attention as one kernel of cuDNN is the same function, and is used where the kernel runs."""

import keras
import numpy as np
import pytest
from keras import ops

from kernels_xla.common import accelerator, cudnn, nvidia
from kernels_xla.softmax_attention import SPEC, softmax_attention
from tests.backends import call, differentiate
from tests.numerics import BFLOAT16, BFLOAT16_LAYER, FLOAT32, SIZES, inputs, masks, relative_error
from tests.oracles import CASES

ON_JAX = keras.config.backend() == "jax"
HAS_KERNEL = not ON_JAX and (nvidia.capability() or (0, 0)) >= nvidia.AMPERE
SHAPE = (2, 256, 4, 64)


@pytest.fixture
def fuses(monkeypatch):
    monkeypatch.setattr(accelerator, "fuses_attention", lambda shape, dtype: True)


@pytest.mark.skipif(not ON_JAX, reason="Keras has the kernel's function on JAX alone")
@pytest.mark.parametrize("case", CASES["softmax_attention"], ids=str)
def test_keras_own_attention_is_ours_in_value_and_every_gradient(case, monkeypatch):
    arrays = inputs(SPEC, e=SIZES["s"])
    ours = differentiate(softmax_attention, case, arrays)
    monkeypatch.setattr(accelerator, "fuses_attention", lambda shape, dtype: True)
    for name, fused in differentiate(softmax_attention, case, arrays).items():
        assert relative_error(fused, ours[name]) < FLOAT32, name


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU that TensorFlow sees, from Ampere on")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [96, 256, 1000])
def test_the_kernel_in_tensorflow_is_ours_in_value_and_every_gradient(n, causal, compiled):
    import tensorflow as tf

    random = np.random.default_rng(0)
    q, k, v, dout = (tf.constant(random.normal(size=(2, n, 4, 64)), tf.bfloat16) for _ in range(4))
    assert accelerator.fuses_attention(tuple(q.shape), q.dtype)

    def both(q, k, v, dout):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out = softmax_attention(q, k, v, causal=causal)
        return [out, *tape.gradient(out, [q, k, v], dout)]

    fused = tf.function(both, jit_compile=compiled)(q, k, v, dout)
    with accelerator.tracing_for("gpu"):
        exact = both(*(tf.cast(x, tf.float32) for x in (q, k, v, dout)))
    for name, one, other in zip(("q", "k", "v"), fused[1:], exact[1:], strict=True):
        assert relative_error(one, other) < BFLOAT16_LAYER, name
    assert relative_error(fused[0], exact[0]) < BFLOAT16


@pytest.fixture
def deterministic():
    from tensorflow.python.framework import config

    config.enable_op_determinism()
    yield
    config.disable_op_determinism()


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU that TensorFlow sees, from Ampere on")
def test_two_equal_calls_give_the_same_bits_each_time_with_deterministic_operators(deterministic):
    import tensorflow as tf

    random = np.random.default_rng(0)
    q, k, v, dout = (tf.constant(random.normal(size=(2, 1024, 4, 64)), tf.bfloat16) for _ in range(4))

    @tf.function(jit_compile=True)
    def gradients(q, k, v, dout):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out = softmax_attention(softmax_attention(q, k, v, causal=True), k, v, causal=True)
        return tape.gradient(out, [q, k, v], dout)

    first, *others = ([x.numpy().tobytes() for x in gradients(q, k, v, dout)] for _ in range(8))
    assert all(other == first for other in others)


@pytest.mark.skipif(ON_JAX, reason="JAX has its own program")
@pytest.mark.parametrize("asked", [False, True])
def test_the_gradient_says_whether_operators_are_deterministic(asked, fuses, monkeypatch, request):
    import tensorflow as tf

    if asked:
        request.getfixturevalue("deterministic")
    programs = []

    def called(program, operands, results):
        programs.append(program)
        return [tf.zeros(shape, dtype) for shape, dtype in results]

    monkeypatch.setattr(nvidia, "call", called)
    q = tf.zeros(SHAPE, tf.bfloat16)
    with tf.GradientTape() as tape:
        tape.watch(q)
        out = softmax_attention(q, q, q)
    tape.gradient(out, q)
    assert ["force_deterministic\\22: true" in program for program in programs] == [False, asked]


@pytest.mark.skipif(ON_JAX or HAS_KERNEL, reason="asks TensorFlow without the kernel")
@pytest.mark.parametrize("causal", [False, True])
def test_tensorflow_reads_the_programs_and_lacks_only_the_gpu(causal):
    import tensorflow as tf

    q, sums = tf.zeros(SHAPE, tf.bfloat16), tf.zeros((2, 4, 256))
    own, of_sums = (SHAPE, "bfloat16"), (sums.shape, "float32")
    forward = cudnn.FORWARD, cudnn.FORWARD_PRODUCTS, [q, q, q], [own, of_sums]
    backward = cudnn.BACKWARD, cudnn.BACKWARD_PRODUCTS, [q, q, q, sums, q, q], [own] * 3
    for text, products, operands, results in (forward, backward):
        program = cudnn.program(text, products, SHAPE, "bfloat16", causal)
        with pytest.raises(tf.errors.OpError, match=r"platform CPU is not among the platforms required .*CUDA"):
            tf.function(lambda *given: nvidia.call(program, list(given), results), jit_compile=True)(*operands)  # noqa: B023


def test_other_masks_and_wider_values_are_not_left_to_it(fuses, monkeypatch):
    monkeypatch.setattr(cudnn, "attention", None)  # whoever calls it, fails
    given = inputs(SPEC, e=SIZES["s"])
    call(softmax_attention, {"causal": True}, inputs(SPEC))  # values wider than queries
    for layout in ("padded", "packed"):
        call(softmax_attention, {"causal": True}, given, masks(layout))
    with pytest.raises(TypeError):
        call(softmax_attention, {"causal": True}, given)


@pytest.mark.skipif(HAS_KERNEL, reason="this machine has it")
def test_a_cpu_has_no_such_kernel():
    assert not any(accelerator.fuses_attention(SHAPE, dtype) for dtype in ("bfloat16", "float16", "float32"))


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(nvidia, "capability", lambda: (8, 0))


def test_it_is_asked_of_a_gpu_for_what_cudnn_takes(on_gpu):
    takes = [(width, dtype) for width in (12, 64, 128, 136) for dtype in ("bfloat16", "float16", "float32", "float64")]
    found = {(s, dtype) for s, dtype in takes if accelerator.fuses_attention((2, 256, 4, s), dtype)}
    assert found == {(width, dtype) for width in (64, 128) for dtype in ("bfloat16", "float16")}


def test_it_is_not_asked_for_unknown_sizes_other_machines_and_who_turned_it_off(on_gpu, monkeypatch):
    assert accelerator.fuses_attention(SHAPE, "bfloat16")
    assert not accelerator.fuses_attention((None, *SHAPE[1:]), "bfloat16")
    for machine in ("gpu", "tpu", "lite"):
        with accelerator.tracing_for(machine):
            assert not accelerator.fuses_attention(SHAPE, "bfloat16")
    monkeypatch.setattr(keras.config, "is_flash_attention_enabled", lambda: False)
    assert not accelerator.fuses_attention(SHAPE, "bfloat16")


def test_a_model_with_batches_of_any_size_is_traced_without_it(on_gpu, monkeypatch):
    monkeypatch.setattr(cudnn, "attention", None)
    q = keras.Input((256, 4, 64), dtype="bfloat16")
    assert keras.Model(q, keras.layers.Lambda(lambda q: softmax_attention(q, q, q))(q)).output_shape[1:] == (256, 4, 64)
    assert ops.shape(q)[0] is None
