"""Compiling for TPUs on this host: libtpu compiles every program here."""

import dataclasses
import functools
import json
import os
import select
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
import tensorflow as tf
from keras import ops

from flash_tf import config
from flash_tf.compiling import artifact, tpu
from flash_tf.compiling.programs import Experiment
from kernels_xla.common.accelerator import tracing_for
from tests.numerics import LOOP_CYCLES, LOOP_FLOPS

pytestmark = pytest.mark.full
PASSES, SIZE = 8, 1024
SQUARE = (SIZE, SIZE)


def of_jax(function, *shapes):
    """A function of bfloat16 arrays as HLO."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16 if shape else jnp.int32) for shape in shapes]
    with jax.enable_x64(False):  # JAX's default; another test may have changed it
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()


def of_tensorflow(function, *shapes):
    """A function of float32 arrays, exported like a training step."""
    traced = tf.function(lambda *arrays: function(*arrays), jit_compile=True, autograph=False)
    return traced.experimental_get_compiler_ir(*[tf.TensorSpec(shape) for shape in shapes])(stage="hlo_serialized")


def layer(x, w):
    return jnp.tanh(x @ w)


def looped(x, w):
    return jax.lax.fori_loop(0, PASSES, lambda _, x: layer(x, w), x)


def unrolled(x, w):
    for _ in range(PASSES):
        x = layer(x, w)
    return x


@functools.cache
def report(function, *shapes, of=of_jax, target="v4:2x2x1"):
    return tpu.compile_for(of(function, *shapes), target)


def test_a_loop_costs_what_its_unrolled_form_costs():
    loop, line = report(looped, SQUARE, SQUARE), report(unrolled, SQUARE, SQUARE)
    assert [one["trip_count"] for one in loop.loops] == [PASSES] and line.loops == []
    assert loop.flops == pytest.approx(line.flops, rel=LOOP_FLOPS)
    assert line.flops == pytest.approx(PASSES * 2 * SIZE**3, rel=LOOP_FLOPS)
    assert line.estimated_cycles <= loop.estimated_cycles <= LOOP_CYCLES * line.estimated_cycles


def test_loops_within_loops_multiply():
    def nested(x, w):
        return jax.lax.fori_loop(0, 5, lambda _, x: looped(x, w) + 1, x)

    loop, once = report(nested, SQUARE, SQUARE), report(looped, SQUARE, SQUARE)
    assert sorted(one["trip_count"] for one in loop.loops) == [5, PASSES]
    assert loop.flops == pytest.approx(5 * once.flops, rel=LOOP_FLOPS)
    assert 5 * once.estimated_cycles <= loop.estimated_cycles <= LOOP_CYCLES * 5 * once.estimated_cycles


def gradient(x, w, loop):
    """Of layers of Keras by their weights."""
    step = lambda i, x: (i + 1, ops.tanh(x @ w))  # noqa: E731
    with tf.GradientTape() as tape:
        tape.watch(w)
        if loop:
            x = ops.while_loop(lambda i, x: i < PASSES, step, (0, x), maximum_iterations=PASSES)[1]
        else:
            for i in range(PASSES):
                x = step(i, x)[1]
        total = tf.reduce_sum(x)
    return tape.gradient(total, w)


def test_the_gradient_of_a_tensorflow_loop_is_counted_too():
    loop, line = (
        report(lambda x, w, loop=loop: gradient(x, w, loop), SQUARE, SQUARE, of=of_tensorflow) for loop in (True, False)
    )
    assert [one["trip_count"] for one in loop.loops] == [PASSES, PASSES]
    products = 3 * PASSES - 1  # three a layer; the loop takes the gradient by the first layer's input too
    assert loop.flops / (products + 1) == pytest.approx(line.flops / products, rel=LOOP_FLOPS)
    assert line.estimated_cycles <= loop.estimated_cycles <= LOOP_CYCLES * line.estimated_cycles


def test_a_loop_whose_trip_count_depends_on_data_is_an_error_that_names_it():
    limited = lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: layer(x, x), x)  # noqa: E731
    growing = lambda x: jax.lax.fori_loop(  # noqa: E731
        0, 4, lambda i, x: jax.lax.fori_loop(0, i, lambda _, x: layer(x, x), x) + 1, x
    )
    for function, shapes, reason in [(limited, (SQUARE, ()), "argument 1"), (growing, (SQUARE,), "with each pass of")]:
        with pytest.raises(ValueError, match=rf"^how often the loop \S+ \(jit\(.*while\) runs is not known.*{reason}"):
            report(function, *shapes)


def test_memory_is_that_of_arguments_and_results_and_the_report_is_plain_values():
    r = report(layer, SQUARE, SQUARE)
    assert r.compiles and r.fits and r.problem == ""
    assert r.hbm_bytes == 3 * 2 * SIZE**2 and r.hbm_traffic_bytes == r.hbm_bytes
    assert r.estimated_ms == pytest.approx(r.estimated_cycles / 1.05e6)
    assert r.roofline_ms == pytest.approx(1e3 * max(r.flops / 137.5e12, r.hbm_traffic_bytes / 614e9))
    assert sum(row["share"] for row in r.costliest) == pytest.approx(1)
    assert json.loads(json.dumps(tpu.as_dict(r))) == dataclasses.asdict(r)
    text = tpu.as_text(r)
    assert "TPU v4, one of a chip's two cores: compiles and fits" in text
    assert f"{r.estimated_ms:,.2f} ms" in text and "dot_general (fusion kOutput): bf16[1024,1024]" in text


def test_both_cores_of_a_chip_have_twice_the_memory_and_need_fewer_cycles():
    for generation, core, chip in [("v4", "", ":megacore"), ("v5p", ":core", "")]:
        one, both = (report(layer, SQUARE, SQUARE, target=f"{generation}:2x2x1{cores}") for cores in (core, chip))
        assert both.hbm_limit_bytes > 1.9 * one.hbm_limit_bytes
        assert both.estimated_cycles < one.estimated_cycles and both.roofline_ms == pytest.approx(one.roofline_ms / 2)


def test_padding_is_what_rounding_up_to_the_matrix_unit_adds():
    useful = 320 * 192 * 200
    for target, padded in [("v4:2x2x1", 384 * 256 * 200), ("v6e:1x1", 320 * 256 * 256)]:
        r = report(layer, (320, 192), (192, 200), target=target)
        assert r.padding_waste == pytest.approx(1 - useful / padded)


def test_a_program_that_does_not_fit_is_reported_with_what_it_needs_and_the_largest_tensor():
    size = 100_000
    r = report(lambda x, w: jnp.sort(x @ w, axis=0), (size, 128), (128, size))
    assert not r.fits and not r.compiles and r.flops is None and r.costliest is None
    assert r.hbm_bytes > r.hbm_limit_bytes == round(15.25 * 2**30)
    assert r.problem.startswith(f"it needs {r.hbm_bytes / 2**30:.2f} GiB of HBM, but a program may use 15.25 GiB; ")
    assert "the largest tensor is " in r.problem and "[100000,100000]" in r.problem and "\n" not in r.problem
    assert r.problem in tpu.as_text(r)


@pytest.mark.parametrize(
    "name", ["v4", "v9:2x2x1", "v4:2x2", "v5e:2x2x1", "v5e:2x2:megacore", "v4:2x2x1:both", "v4:3x3x3", ""]
)
def test_a_topology_that_does_not_exist_is_an_error_that_lists_what_does(name):
    with pytest.raises(ValueError, match=f"^there is no TPU topology '{name}'; there are v4 .* v5p .* v5e .* v6e"):
        report(layer, SQUARE, SQUARE, target=name)


def test_bytes_that_hold_no_program_are_an_error():
    for compiled in (tpu.analyse, lambda b: tpu.compile_for(b, "v6e:1x1")):
        with pytest.raises(ValueError, match="^it holds no HLO module"):
            compiled(b"nothing")


def test_recomputing_saves_a_tpus_memory():
    sizes = ["model.depth=4", "model.width=128", "data.sequence_length=2048", "train.tokens_per_step=2048"]
    needed = {}
    for remat in ("0", "2", "true"):
        loaded = config.load("wikitext2_lm/transformer_plus_plus", [*sizes, f"model.remat={remat}"])
        with tracing_for("tpu"):
            program = Experiment(*artifact.resolve(loaded)).trace_step(1, 2048)
        needed[remat] = tpu.compile_for(program.serialized, "v4:2x2x1").hbm_bytes
    weights = 4 * 4 * 2048**2  # bytes of a block: float32, 4 heads, all pairs
    assert needed["0"] - needed["2"] > weights
    assert needed["2"] - needed["true"] > weights


@pytest.mark.parametrize(
    ("libtpu", "said"),
    [
        ("raise ImportError('no libtpu')", r"needs .* libtpu 0.0.51 .*\(no libtpu\): pip install 'flash-tf\[aot\]'"),
        ("__version__ = '0.0.10'", r"found jax .*, libtpu 0.0.10: pip install 'flash-tf\[aot\]'"),
        ("import os, sys; sys.stderr.write('out of luck\\n'); os._exit(3)", r"crashed \(exit status 3\): out of luck$"),
        ("raise RuntimeError('out of order')", r"crashed \(exit status 1\): RuntimeError: out of order$"),
        (
            "import os; os.kill(os.getpid(), 9)",
            r"^the compiler was killed \(signal 9\), probably because memory ran out",
        ),
    ],
)
def test_a_compiler_that_is_missing_too_old_or_crashes_is_one_line(tmp_path, monkeypatch, libtpu, said):
    (tmp_path / "libtpu.py").write_text(libtpu)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ValueError, match=said):
        tpu.compile_for(of_jax(layer, SQUARE, SQUARE), "v4:2x2x1")


def test_settings_of_the_hosts_own_devices_do_not_reach_the_compiler(monkeypatch):
    serialized = of_jax(layer, SQUARE, SQUARE)
    for name, value in {
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "XLA_FLAGS": "--no_such",
        "JAX_PLATFORMS": "tpu",
    }.items():
        monkeypatch.setenv(name, value)
    assert tpu.compile_for(serialized, "v4:2x2x1") == report(layer, SQUARE, SQUARE)


def test_the_compiler_ends_with_the_process_that_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "step.hlo.pb")  # so that it reads for as long as this test does not write
    program = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    worker = ["-m", "flash_tf.compiling.tpu_worker", tmp_path]
    with subprocess.Popen([sys.executable, "-c", program, *worker]) as waiting:
        for _ in range(600):
            try:
                end = os.open(tmp_path / "step.hlo.pb", os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:  # no process reads yet
                time.sleep(0.1)
        waiting.kill()
    reader = select.poll()
    reader.register(end, 0)
    assert reader.poll(60_000) == [(end, select.POLLERR)]  # no process reads any longer
    os.close(end)
