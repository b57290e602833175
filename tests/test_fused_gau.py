"""GAU's fused attention is the einsums' function, in value and every gradient, under every mask, by an interpreter."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import GatedAttentionUnit
from kernels_pallas import gau as fused_gau
from kernels_pallas import programs
from kernels_xla.common import nvidia
from kernels_xla.common.rotary import rope_tables, rotate
from kernels_xla.gau import gau_attention
from tests import backends, tiers
from tests.fused import by_implementation, step
from tests.numerics import ALIVE, BFLOAT16_FACTOR, FLOAT32, errors, masks

TURNED = (True, True)
B, N, S, E = 2, 150, 16, 16  # two tiles of tokens, the second with padding
TILES = np.repeat([[2**24, 2**24 + 1], [3, 3]], 128, axis=1)  # the documents of two rows; float32 has no 2^24 + 1
WHOLE = 300  # of a row without holes: it has tiles below the diagonal that no mask touches
CASES = {
    "causal": {"causal": True},
    "masked": {"causal": False},
    "paper": {"causal": True, "scale": "paper_appendix", "divisor": "length"},
    "constant": {"causal": False, "divisor": 40},
}
LAYOUTS = ("whole", "padded", "packed")


DRAWS = range(1, 5)  # seeds


def drawn(n, seed):
    rng = np.random.default_rng(seed)
    sizes = {"p": (B, n, 2 * E + S), "bias": (2 * E + S,), "a": (S,), "b": (S,), "scales": (2, S), "offsets": (2, S)}
    deviation = {"a": 0.3, "b": 0.3, "offsets": 0.1}
    drawn = {name: deviation.get(name, 1) * rng.normal(size=size) for name, size in sizes.items()}
    return {name: x.astype("float32").astype("float64") for name, x in drawn.items()}


def angles(n, ids, dtype):
    """Positions start again in each document of packed rows, which then have angles of their own."""
    positions = np.arange(n)[None] if ids is None else np.arange(n)[None] % (50 + np.arange(B)[:, None])
    return rope_tables(ops.convert_to_tensor(positions, "int32"), S, dtype)


def fused(p, bias, a, b, scales, offsets, **options):
    tables = angles(p.shape[1], options.get("segment_ids"), "float32")
    return fused_gau.gated_attention(p, bias, scales, offsets, *tables, a, b, turned=TURNED, value_width=E, **options)


def einsums(p, bias, a, b, scales, offsets, **options):
    u, v, z = ops.split(ops.silu(p + bias), [E, 2 * E], axis=-1)
    cos, sin = angles(z.shape[1], options.get("segment_ids"), keras.backend.standardize_dtype(z.dtype))
    q, k = (rotate(z * scales[i] + offsets[i], cos, sin)[:, :, None] for i in range(2))
    return u * gau_attention(q, k, v[:, :, None], a, b, **options)[:, :, 0]


def both(case, layout, dtype="float32", seed=DRAWS[0]):
    n = {"whole": WHOLE, "tiles": 256}.get(layout, N)
    masked = {"segment_ids": TILES} if layout == "tiles" else masks(layout, B, n)
    arrays = drawn(n, seed)
    exact = backends.differentiate(einsums, case, arrays, masked, "float64")
    own = functools.partial(fused)  # a compiled one would ignore a patch
    return [backends.differentiate(f, case, arrays, masked, dtype) for f in (own, einsums)], exact


def assert_as_exact(found, einsums):
    """By root mean squares over draws: in one, a sum into few numbers, as a scale's gradient, is exact by chance."""
    mean = lambda of: {name: np.sqrt(np.mean([one[name] ** 2 for one in of])) for name in of[0]}  # noqa: E731
    found, least = mean(found), mean(einsums)
    assert all(found[name] < BFLOAT16_FACTOR * least[name] for name in found), (found, least)


DEFAULT = (
    [("causal", "padded"), ("masked", "whole")] if tiers.ON_JAX else [("causal", "packed"), ("constant", "padded")]
)
EVERY = [
    pytest.param(*one, marks=[] if one in DEFAULT else [pytest.mark.full])
    for one in ((case, layout) for case in CASES for layout in LAYOUTS)
]


@pytest.mark.parametrize(("case", "layout"), EVERY)
def test_it_is_the_einsums_in_value_and_every_gradient(case, layout, interpreted):
    (got, _), exact = both(CASES[case], layout)
    found = errors(got, exact)
    assert max(found.values()) < FLOAT32, found
    assert min(np.count_nonzero(x) / x.size for x in exact.values()) > ALIVE


@tiers.full_on_jax
def test_a_document_that_fills_a_tile_does_not_see_another(interpreted):
    (got, _), exact = both(CASES["masked"], "tiles")
    assert max(errors(got, exact).values()) < FLOAT32


@pytest.mark.full
def test_in_bfloat16_it_is_as_exact_as_the_einsums(interpreted):
    found = [both(CASES["causal"], "whole", dtype="bfloat16", seed=seed) for seed in DRAWS]
    assert_as_exact(*([errors(made[i], exact) for made, exact in found] for i in range(2)))


LAYER = {"key_dim": 16, "causal": True}


@pytest.mark.parametrize(("options", "packed"), [({}, False), ({"scale": "paper_appendix", "use_bias": False}, True)])
@tiers.full_on_jax
def test_a_layer_trains_with_them_as_with_einsums(options, packed, interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(2, 37, 16)), "float32")
    layers = by_implementation(GatedAttentionUnit, x.shape, **LAYER, **options)
    masked = backends.tensors(masks("packed", 2, 37), "float32") if packed else {}
    found = {name: step(layer, x, masked) for name, layer in layers.items()}
    assert max(errors(found["pallas"], found["xla"]).values()) < FLOAT32
    monkeypatch.setattr(programs, "run", None)  # whoever calls it, fails
    layers["pallas"](x)
    GatedAttentionUnit(**LAYER)(x, training=True)
    GatedAttentionUnit(**LAYER)(x, training=True, prefix_mask=ops.ones(x.shape[:2], "bool"))
    with pytest.raises(TypeError):
        layers["pallas"](x, training=True)


def test_one_line_says_what_they_need():
    x = ops.ones((1, 16, 16))
    with pytest.raises(ValueError, match=r"implementation 'pallas' needs an NVIDIA GPU of compute capability 9\.0"):
        GatedAttentionUnit(**LAYER, implementation="pallas")(x, training=True)
    with pytest.raises(ValueError, match="from 16, got 128 in float32, values of 32, keys of 48"):
        GatedAttentionUnit(key_dim=48, implementation="pallas")(x, training=True)
    with pytest.raises(ValueError, match="implementation 'pallas' needs no prefix_mask, got one"):
        prefix = ops.ones((1, 16), "bool")
        GatedAttentionUnit(**LAYER, implementation="pallas")(x, training=True, prefix_mask=prefix)
    with pytest.raises(ValueError, match="needs .*'heads': 1.*, got .*'heads': 2"):
        GatedAttentionUnit(heads=2, implementation="pallas")
    with pytest.raises(ValueError, match="implementation must be one of auto, xla, pallas, got 'cuda'"):
        GatedAttentionUnit(implementation="cuda")


@pytest.mark.skipif((nvidia.capability() or (0, 0)) < nvidia.HOPPER, reason="needs an NVIDIA GPU from Hopper on")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("causal", "b", "n"), [(True, 4, 2048), (True, 2, 1000), (False, 2, 1000)])
def test_a_layer_on_a_gpu_trains_with_them_as_with_einsums(causal, b, n, layout):
    packed = layout == "packed"
    m = fused_gau.sizes((b, n, 3200), "bfloat16", 1536, causal, TURNED, b if packed else 1)
    if (found := fused_gau.obstacle(m)) is not None:
        pytest.skip(f"the kernels need {found}")
    backends.seed(0)
    masked, options = backends.tensors(masks(layout, b, n), "float32"), {"causal": causal, "name": "mixer"}
    layers = {
        "pallas": GatedAttentionUnit(**options, implementation="pallas", dtype="bfloat16"),
        "xla": GatedAttentionUnit(**options, implementation="xla", dtype="bfloat16"),
        "exact": GatedAttentionUnit(**options, implementation="xla", dtype="float32"),
    }
    for layer in layers.values():
        layer.build((b, n, 768))
        layer.set_weights([np.asarray(w, "float32") for w in layers["pallas"].get_weights()])
    found = []
    for seed in DRAWS:
        x = ops.cast(np.random.default_rng(seed).normal(size=(b, n, 768)), "bfloat16")
        found.append({name: step(layer, ops.cast(x, layer.compute_dtype), masked) for name, layer in layers.items()})
    assert_as_exact(*([errors(one[name], one["exact"]) for one in found] for name in ("pallas", "xla")))


def of_size(b, n, e=1536, s=128, *, causal=True, dtype="bfloat16"):
    return fused_gau.sizes((b, n, 2 * e + s), dtype, e, causal, TURNED)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_auto_takes_them_where_they_were_measured_to_be_faster(backend, monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    faster = [of_size(b, n) for b, n in ((32, 2048), (8, 8192), (32, 1024), (4, 16_384), (32, 512), (8, 2048))]
    faster += [of_size(b, n, causal=False) for b, n in ((128, 512), (32, 2048))]
    others = [of_size(b, n) for b, n in ((2, 32_768), (4, 2048), (256, 256))]
    others += [of_size(b, n, causal=False) for b, n in ((8, 8192), (32, 512), (256, 256))]
    others += [of_size(32, 2048, e=1024), of_size(32, 2048, s=64), of_size(32, 2048, dtype="float32")]
    assert {*map(fused_gau.is_faster, faster)} == {backend == "tensorflow"}
    assert not any(map(fused_gau.is_faster, others))
