"""FLASH's fused core is the einsums' function, in value and every gradient, under every mask. Pallas interprets it."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import MixedChunkAttention
from kernels_pallas import flash, programs, sizes
from kernels_xla.common import nvidia
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.rotary import rope_tables, rotate
from kernels_xla.flash.attention import mixed_chunk_attention
from tests import backends, tiers
from tests.fused import step
from tests.numerics import ALIVE, BFLOAT16_FACTOR, FLOAT32, errors, masks

HEADS = ("quad_q", "quad_k", "lin_q", "lin_k")
TURNED = (True, False, True, True)  # heads that are rotated
B, N, S, E, C = 2, 37, 24, 16, 8  # half a head takes three tiles of columns
CASES = {
    "causal": {"causal": True},
    "masked": {"causal": False},
    "paper": {"causal": True, "scale": "paper_appendix", "chunk_divisor": True},
}
LAYOUTS = ("whole", "padded", "packed")


def drawn(n=N):
    rng = np.random.default_rng(1)  # 0 draws a relative bias that is negative at every distance
    sizes = {"p": (B, n, 2 * E + S), "bias": (2 * E + S,), "a": (S,), "b": (S,), "scales": (4, S), "offsets": (4, S)}
    deviation = {"a": 0.3, "b": 0.3, "offsets": 0.1}  # large ones may silence all of relu²
    drawn = {name: deviation.get(name, 1) * rng.normal(size=size) for name, size in sizes.items()}
    return {name: x.astype("float32").astype("float64") for name, x in drawn.items()}


def angles(n, ids, dtype):
    """Positions start again in each document of packed rows, which then have angles of their own."""
    positions = np.arange(n)[None] if ids is None else np.arange(n)[None] % (5 + np.arange(B)[:, None])
    return rope_tables(ops.convert_to_tensor(positions, "int32"), S, dtype)


def heads(z, scales, offsets, ids):
    made = {name: z * scales[i] + offsets[i] for i, name in enumerate(HEADS)}
    cos, sin = angles(z.shape[1], ids, sum_dtype(z))
    return {name: rotate(x, cos, sin) if turned else x for (name, x), turned in zip(made.items(), TURNED, strict=True)}


def fused(p, bias, a, b, scales, offsets, chunk_size=C, **options):
    options |= {"value_width": E, "chunk_size": chunk_size, "turned": TURNED}
    tables = angles(p.shape[1], options.get("segment_ids"), "float32")
    return flash.gated_mixed_chunk_attention(p, bias, scales, offsets, *tables, a, b, **options)


def einsums(p, bias, a, b, scales, offsets, chunk_size=C, **options):
    u, v, z = ops.split(ops.silu(p + bias), [E, 2 * E], axis=-1)
    made = heads(z, scales, offsets, options.get("segment_ids"))
    return u * mixed_chunk_attention(**made, v=v, a=a, b=b, chunk_size=chunk_size, **options)


def both(case, layout, n=N, dtype="float32"):
    arrays, masked = drawn(n), masks(layout, B, n)
    exact = backends.differentiate(einsums, case, arrays, masked, "float64")
    own = functools.partial(fused)  # a compiled one would ignore a patch
    return [backends.differentiate(f, case, arrays, masked, dtype) for f in (own, einsums)], exact


# On JAX, where Pallas is at home, and on TensorFlow, which runs the kernels between two of its own operations.
DEFAULT = (
    [("causal", "padded", True), ("masked", "whole", False)]
    if tiers.ON_JAX
    else [("causal", "packed", False), ("masked", "whole", False)]
)
ALL = [(case, layout, False) for case in CASES for layout in LAYOUTS]
ALL += [("causal", layout, True) for layout in LAYOUTS]
EVERY = [pytest.param(*one, marks=[] if one in DEFAULT else [pytest.mark.full]) for one in ALL]


@pytest.mark.parametrize(("case", "layout", "sums_inside"), EVERY)
@pytest.mark.usefixtures("interpreted", "patched_kernels")
def test_it_is_the_einsums_in_value_and_every_gradient(case, layout, sums_inside, monkeypatch):
    monkeypatch.setattr("kernels_pallas.head_kernels.NUMBERS", 8)  # several turns of its loop
    if sums_inside:
        monkeypatch.setattr(sizes, "MULTIPROCESSORS", 1)
    (got, _), exact = both(CASES[case], layout)
    found = errors(got, exact)
    assert max(found.values()) < FLOAT32, found
    assert min(np.count_nonzero(x) / x.size for x in exact.values()) > ALIVE


@pytest.mark.skipif(not tiers.ON_JAX, reason="asks nothing of TensorFlow")
def test_a_causal_tile_is_right_without_the_blocks_that_it_does_not_see(interpreted):
    (got, _), exact = both({"causal": True, "chunk_size": 256}, "whole", n=300)
    found = errors(got, exact)
    assert max(found.values()) < FLOAT32, found


@pytest.mark.full
def test_in_bfloat16_it_is_as_exact_as_the_einsums(interpreted):
    (got, einsum), exact = both(CASES["causal"], "whole", dtype="bfloat16")
    found, least = errors(got, exact), errors(einsum, exact)
    assert all(found[name] < BFLOAT16_FACTOR * least[name] for name in found), (found, least)


LAYER = {"chunk_size": 16, "key_dim": 16, "causal": True}


OTHER = {"rotary_heads": "local", "use_bias": False}, True  # and packed rows, whose positions differ


@pytest.mark.parametrize(("options", "packed"), [({}, False), OTHER], ids=str)
@tiers.full_on_jax
def test_a_layer_trains_with_them_as_with_einsums(options, packed, interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    given = {**LAYER, **options}
    backends.seed(0)  # a draw whose relative bias gets nearly no gradient has no exact one
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(2, 37, 16)), "float32")
    layers = {name: MixedChunkAttention(**given, implementation=name, name="mixer") for name in ("xla", "pallas")}
    for layer in layers.values():
        layer.build(x.shape)
    layers["pallas"].set_weights(layers["xla"].get_weights())
    masked = backends.tensors(masks("packed", 2, 37), "float32") if packed else {}
    found = {name: step(layer, x, masked) for name, layer in layers.items()}
    assert max(errors(found["pallas"], found["xla"]).values()) < FLOAT32
    monkeypatch.setattr(programs, "run", None)  # whoever calls it, fails
    layers["pallas"](x)
    MixedChunkAttention(**given)(x, training=True)
    with pytest.raises(TypeError):
        layers["pallas"](x, training=True)


def test_one_line_says_what_they_need():
    x = ops.ones((1, 16, 16))
    with pytest.raises(ValueError, match=r"implementation 'pallas' needs an NVIDIA GPU of compute capability 9\.0"):
        MixedChunkAttention(**LAYER, implementation="pallas")(x, training=True)
    got = lambda tokens, c, s: f"from 16, got {tokens} in float32, chunks of {c}, values of 32, keys of {s}"  # noqa: E731
    for tokens, c, s in ((24, 12, 16), (16, 16, 48), (0, 16, 16)):
        with pytest.raises(ValueError, match=got(tokens, c, s)):
            MixedChunkAttention(c, key_dim=s, implementation="pallas")(x[:, :tokens], training=True)
    with pytest.raises(ValueError, match="needs .*'overlapping': False.*, got .*'overlapping': True"):
        MixedChunkAttention(overlapping=True, implementation="pallas")
    with pytest.raises(ValueError, match="implementation must be one of auto, xla, pallas, got 'cuda'"):
        MixedChunkAttention(implementation="cuda")


@pytest.mark.skipif((nvidia.capability() or (0, 0)) < nvidia.HOPPER, reason="needs an NVIDIA GPU from Hopper on")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("causal", "b", "n"), [(True, 6, 2048), (True, 2, 1000), (False, 2, 1000)])
def test_a_layer_on_a_gpu_trains_with_them_as_with_einsums(causal, b, n, layout):
    packed, turned = layout == "packed", (True,) * 4
    m = flash.sizes((b, n, 3200), "bfloat16", 1536, 256, causal, packed, turned, b if packed else 1)
    if (found := flash.obstacle(m)) is not None:
        pytest.skip(f"the kernels need {found}")
    # Over 32 draws of weights, on a CPU, a relative bias has 0.3 to 5 times the error of einsums, 1.2 in the median: it
    # sums much into few numbers. All others stay below 1.6.
    backends.seed(0)
    x = ops.cast(np.random.default_rng(0).normal(size=(b, n, 768)), "bfloat16")
    masked = backends.tensors(masks(layout, b, n), "float32")
    found, options = {}, {"causal": causal, "name": "mixer"}
    layers = {
        "pallas": MixedChunkAttention(**options, implementation="pallas", dtype="bfloat16"),
        "xla": MixedChunkAttention(**options, implementation="xla", dtype="bfloat16"),
        "exact": MixedChunkAttention(**options, implementation="xla", dtype="float32"),
    }
    for name, layer in layers.items():
        layer.build(x.shape)
        layer.set_weights([np.asarray(w, "float32") for w in layers["pallas"].get_weights()])
        found[name] = step(layer, ops.cast(x, layer.compute_dtype), masked)
    error = {name: errors(found[name], found["exact"]) for name in ("pallas", "xla")}
    assert all(error["pallas"][k] < BFLOAT16_FACTOR * e for k, e in error["xla"].items()), error


def of_base(b, n, **options):
    given = {"value_width": 1536, "chunk_size": 256, "causal": True, "packed": False, "turned": (True,) * 4, **options}
    return flash.sizes((b, n, 3200), "bfloat16", **given)


def of_size(b, n, chunk_size, e, *, causal=True, s=128):
    return flash.sizes((b, n, 2 * e + s), "bfloat16", e, chunk_size, causal, False, (True,) * 4)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_auto_takes_them_where_they_were_measured_to_be_faster(backend, monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    faster = [of_base(b, n) for b, n in ((128, 512), (32, 2048), (8, 8192))]
    in_tensorflow = [
        of_base(b, n) for b, n in ((2, 32_768), (1, 65_536), (32, 1024), (1, 32_768), (2, 8192), (8, 1024))
    ]
    in_tensorflow += [of_base(b, n, causal=False) for b, n in ((128, 512), (8, 8192), (4, 8192), (16, 1024))]
    in_tensorflow += [of_base(b, n, packed=True, causal=c) for b, n in ((128, 512), (8, 8192)) for c in (True, False)]
    in_tensorflow += [of_size(32, 2048, 256, e) for e in (1024, 2048)]
    in_tensorflow += [of_size(8, 8192, 512, 2048), of_size(32, 2048, 128, 1536)]
    others = [of_base(4, 8192, packed=True), of_base(7, 1024), of_base(2, 2048), of_base(256, 512, value_width=768)]
    others += [of_base(b, n, causal=False) for b, n in ((16, 512), (2, 4096), (15, 1024))]
    others += [of_size(32, 2048, 64, 1536), of_size(32, 2048, 256, 512), of_size(32, 2048, 256, 4096)]
    others += [of_size(32, 2048, 256, 1568), of_size(31, 2048, 256, 2048), of_size(1, 65_536, 256, 2048)]
    others += [of_size(32, 2048, 256, 2048, causal=False), of_size(32, 2048, 256, 2048, s=64)]
    assert all(map(flash.is_faster, faster)) and not any(map(flash.is_faster, others))
    assert {*map(flash.is_faster, in_tensorflow)} == {backend == "tensorflow"}


def test_programs_are_kept_by_source_and_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "HOME", tmp_path)
    m = of_base(8, 8192)
    with pytest.raises(ValueError, match=r"JAX 0\.7\.0 in .*env, as docs/layers.md says, got none"):
        programs.programs(["gated"], m)
    written = []

    def write(missing):
        (tmp_path / "programs").mkdir(exist_ok=True)
        written.extend(missing.values())
        for name in missing:
            (tmp_path / "programs" / name).write_bytes(b"")

    monkeypatch.setattr(programs, "_write", write)
    assert programs.programs(["gated"], m) == programs.programs(["gated"], m)
    assert programs.programs(["gated"], of_base(8, 4096)) != programs.programs(["gated"], m)
    assert [name for name, *_ in written] == ["gated", "gated"]
