"""Mamba's fused scan is the einsums' function, in value and every gradient, under every mask. Pallas interprets it."""

import functools
import re

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import Mamba
from kernels_pallas import mamba, programs
from kernels_xla.common import nvidia
from kernels_xla.mamba.selective_scan import selective_scan
from tests import backends, tiers
from tests.fused import by_implementation, step
from tests.numerics import ALIVE, BFLOAT16_FACTOR, FLOAT32, errors, masks

B, E, S = 2, 32, 4
LAYOUTS = ("whole", "padded", "packed")


def drawn(n):
    rng = np.random.default_rng(0)
    arrays = {"x": (B, n, E), "b": (B, n, S), "c": (B, n, S), "d": (E,)}
    arrays = {name: rng.normal(size=size) for name, size in arrays.items()}
    arrays |= {"dt": rng.uniform(0, 0.5, (B, n, E)), "a": rng.uniform(-2, 0, (E, S))}
    return {name: x.astype("float32").astype("float64") for name, x in arrays.items()}


def both(layout, n, dtype="float32"):
    arrays, masked = drawn(n), masks(layout, B, n)
    exact = backends.differentiate(selective_scan, {}, arrays, masked, "float64")
    fused = functools.partial(mamba.selective_scan)  # one of its own: a compiled one would ignore a patch
    return [backends.differentiate(f, {}, arrays, masked, dtype) for f in (fused, selective_scan)], exact


@pytest.mark.parametrize("layout", tiers.thinned(LAYOUTS, "packed"))
@pytest.mark.parametrize("parts", tiers.thinned([1, 4], 4))
def test_it_is_the_einsums_in_value_and_every_gradient(parts, layout, interpreted, monkeypatch):
    monkeypatch.setattr(mamba, "SHORTEST", 32 // parts)
    n = 32 if layout == "whole" else 37
    assert mamba.sizes((B, n, E), S, "float32").parts == parts
    (got, _), exact = both(layout, n)
    found = errors(got, exact)
    assert max(found.values()) < FLOAT32, found
    assert min(np.count_nonzero(x) / x.size for x in exact.values()) > ALIVE


@pytest.mark.full
def test_in_bfloat16_it_is_as_exact_as_the_einsums(interpreted):
    (got, einsum), exact = both("whole", 37, dtype="bfloat16")
    found, least = errors(got, exact), errors(einsum, exact)
    assert all(found[name] < BFLOAT16_FACTOR * least[name] for name in found), (found, least)


@pytest.mark.skipif(tiers.ON_JAX, reason="JAX traces a gradient, and a tracer has no value")
def test_the_backward_pass_makes_its_states_from_the_upstream_gradient_on(interpreted, monkeypatch):
    run, given = programs.run, {}

    def record(name, m, *tensors):
        given[name] = [np.asarray(x) for x in tensors]
        return run(name, m, *tensors)

    monkeypatch.setattr(programs, "run", record)
    inputs = backends.tensors(drawn(16), "float32")
    backends.value_and_gradients(mamba.selective_scan, inputs, lambda shape: np.full(shape, np.nan))
    assert np.isfinite(given["scan"][2]).all()
    assert np.isnan(given["scan_states"][2]).all()  # of a, which alone depends on it


@tiers.full_on_jax
def test_a_layer_trains_with_it_as_with_einsums(interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(2, 13, 16)), "float32")
    made = by_implementation(Mamba, x.shape, state_size=4)
    found = {name: step(layer, x) for name, layer in made.items()}
    assert max(errors(found["pallas"], found["xla"]).values()) < FLOAT32
    monkeypatch.setattr(programs, "run", None)  # whoever calls it, fails
    made["pallas"](x)
    Mamba()(x, training=True)
    with pytest.raises(TypeError):
        made["pallas"](x, training=True)


def test_one_line_says_what_it_needs():
    x = ops.ones((1, 16, 16))
    with pytest.raises(
        ValueError, match=r"Mamba: implementation 'pallas' needs an NVIDIA GPU of compute capability 9\.0"
    ):
        Mamba(implementation="pallas")(x, training=True)
    with pytest.raises(
        ValueError, match="a multiple of 16 and states that are a power of 2, got float32, 32 channels of 5"
    ):
        Mamba(implementation="pallas", state_size=5)(x, training=True)
    with pytest.raises(ValueError, match="Mamba: implementation must be one of auto, xla, pallas, got 'cuda'"):
        Mamba(implementation="cuda")


@pytest.mark.skipif((nvidia.capability() or (0, 0)) < nvidia.HOPPER, reason="needs an NVIDIA GPU from Hopper on")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("b", "n"), [(8, 2048), (2, 1001)])  # one part, and two
def test_a_layer_on_a_gpu_trains_with_it_as_with_einsums(b, n, layout):
    m = mamba.sizes((b, n, 1536), 16, "bfloat16")
    if (found := mamba.obstacle(m)) is not None:
        pytest.skip(f"the kernels need {found}")
    x = ops.cast(np.random.default_rng(0).normal(size=(b, n, 768)), "bfloat16")
    masked = backends.tensors(masks(layout, b, n), "float32")
    found = {
        name: step(layer, x, masked, compiled=True)
        for name, layer in by_implementation(Mamba, x.shape, dtype="bfloat16").items()
    }
    exact = step(by_implementation(Mamba, x.shape)["xla"], ops.cast(x, "float32"), masked, compiled=True)
    error = {name: errors(found[name], exact) for name in found}
    assert all(error["pallas"][k] < BFLOAT16_FACTOR * e for k, e in error["xla"].items()), error


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_auto_takes_it_where_it_was_measured_to_be_faster(monkeypatch, backend):
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    sizes = lambda b, n, e=1536, states=16, dtype="bfloat16": mamba.sizes((b, n, e), states, dtype)  # noqa: E731
    measured = [sizes(8, 8192), sizes(128, 512), sizes(4, 8192), sizes(1, 65_536), sizes(8, 8192, dtype="float32")]
    assert {*map(mamba.is_faster, measured)} == {backend == "tensorflow"}
    others = [sizes(4, 4096), sizes(1, 256), sizes(8, 8192, states=8), sizes(8, 8192, e=1552), sizes(8, 8192, e=768)]
    assert not any(map(mamba.is_faster, others))


@pytest.mark.skipif(tiers.ON_JAX, reason="JAX runs the kernels without programs")
def test_a_failure_to_write_programs_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "HOME", tmp_path)
    monkeypatch.setattr(nvidia, "capability", lambda: nvidia.HOPPER)
    tried = []
    write = programs._write
    monkeypatch.setattr(programs, "_write", lambda missing: (tried.append(missing), write(missing)))
    m = mamba.sizes((2, 40, 16), 4, "float32")
    for _ in range(2):
        assert re.search(r"JAX 0\.7\.0 in .*env, as docs/layers.md says, got none", mamba.obstacle(m))
    assert len(tried) == 1 and len(tried[0]) == len(mamba.KERNELS)
