"""Fused linear attention with decay is the einsums' function, in value and every gradient. Pallas interprets it."""

import numpy as np
import pytest
from keras import ops

from flash_tf.layers import GatedLinearAttention, Retention
from kernels_pallas import decay_kernels, decayed, programs
from kernels_xla import gla, retention
from kernels_xla.common import nvidia
from tests import backends, tiers
from tests.fused import by_implementation, step
from tests.numerics import ALIVE, BFLOAT16_FACTOR, FLOAT32, errors, masks, relative_error

B, H = 2, 2
FORMS = {
    "gla": (decayed.gated_linear_attention, gla.gated_linear_attention),
    "retention": (decayed.retention, retention.retention),
}
LAYERS = {"gla": GatedLinearAttention, "retention": Retention}
LAYOUTS = ("whole", "padded", "packed")
MILD, STRONG = -0.05, -6.0  # of the strongest log decay: most of a state passes a chunk, or hardly anything does


def drawn(name, n, s=16, e=32, strongest=MILD):
    rng = np.random.default_rng(0)
    arrays = {x: rng.normal(size=(B, n, H, width)) for x, width in (("q", s), ("k", s), ("v", e))}
    arrays["log_decay"] = rng.uniform(strongest, 0, (B, n, H, s) if name == "gla" else (B, n, H))
    return {name: x.astype("float32").astype("float64") for name, x in arrays.items()}


def fused_and_exact(name, arrays, layout, dtype="float32"):
    """Value and gradients by the kernels in `dtype`, and by einsums in float64."""
    masked = masks(layout, B, arrays["q"].shape[1])
    fused = lambda *given, **named: FORMS[name][0](*given, **named)  # noqa: E731  a compiled one would ignore a patch
    got = backends.differentiate(fused, {}, arrays, masked, dtype)
    return got, backends.differentiate(FORMS[name][1], {}, arrays, masked, "float64")


@pytest.mark.parametrize("layout", tiers.thinned(LAYOUTS, "packed"))
@pytest.mark.parametrize(("name", "strongest"), [("gla", MILD), ("gla", STRONG), ("retention", MILD)])
def test_it_is_the_einsums_in_value_and_every_gradient(name, strongest, layout, interpreted):
    got, exact = fused_and_exact(name, drawn(name, 150, strongest=strongest), layout)  # three chunks
    found = errors(got, exact)
    assert max(found.values()) < FLOAT32, found
    assert min(np.count_nonzero(x) / x.size for x in exact.values()) > ALIVE


@tiers.full_on_jax
@pytest.mark.parametrize("name", FORMS)
def test_heads_of_several_tiles_are_it_too(name, interpreted):
    m = decayed.sizes((B, 37, H, 96), 48, name == "retention", "float32")
    assert m.s // m.keys > 1 and m.e // m.values > 1
    got, exact = fused_and_exact(name, drawn(name, 37, s=48, e=96), "whole")
    assert max(errors(got, exact).values()) < FLOAT32


@tiers.full_on_jax
def test_a_chunk_of_nearly_mild_decays_is_it_too(interpreted):
    arrays = drawn("gla", 128)
    arrays["log_decay"][:], arrays["log_decay"][:, 64] = (
        -1.2,
        -3.0,
    )  # -38.4, and -41.4
    got, exact = fused_and_exact("gla", arrays, "whole")
    assert max(errors(got, exact).values()) < FLOAT32


@pytest.mark.full
@pytest.mark.parametrize("strongest", [MILD, STRONG])
@pytest.mark.parametrize("name", FORMS)
def test_in_bfloat16_it_is_as_exact_as_the_einsums(name, strongest, interpreted):
    arrays = drawn(name, 150, strongest=strongest)
    got, exact = fused_and_exact(name, arrays, "whole", dtype="bfloat16")
    einsum = backends.differentiate(FORMS[name][1], {}, arrays, {}, "bfloat16")
    found, least = errors(got, exact), errors(einsum, exact)
    assert all(found[key] < BFLOAT16_FACTOR * least[key] for key in found), (found, least)


@tiers.full_on_jax
@pytest.mark.parametrize("name", FORMS)
def test_a_document_sees_nothing_of_another(name, interpreted):
    arrays, masked = drawn(name, 70), {"segment_ids": np.repeat([[1, 2, 3]], [5, 40, 25], axis=1).repeat(B, axis=0)}
    found = []
    for scale in (1, 1e15):
        arrays["k"][:, :5] *= scale  # a leak of e^-41 would show
        tensors = backends.tensors({**arrays, **masked}, "float32")
        found.append(backends.to_numpy(FORMS[name][0](**tensors)))
    assert np.array_equal(found[0][:, 5:], found[1][:, 5:]) and not np.array_equal(found[0][:, :5], found[1][:, :5])


@tiers.full_on_jax
def test_a_chunk_with_mild_decays_takes_one_product_for_all_pairs(interpreted, patched_kernels, monkeypatch):
    monkeypatch.setattr(decay_kernels, "_over_halves", lambda *given: given[-1])  # as if no pair had weight
    error = {}
    for strongest in (MILD, STRONG):
        tensors = backends.tensors(drawn("gla", 64, strongest=strongest), "float32")
        got, want = (backends.to_numpy(function(**tensors)) for function in FORMS["gla"])
        error[strongest] = relative_error(got, want)
    assert error[MILD] < FLOAT32 < ALIVE < error[STRONG], error


@tiers.full_on_jax
@pytest.mark.parametrize("name", FORMS)
def test_a_layer_trains_with_it_as_with_einsums(name, interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(2, 13, 64)), "float32")
    made = by_implementation(LAYERS[name], x.shape, heads=2)
    found = {value: step(layer, x) for value, layer in made.items()}
    assert max(errors(found["pallas"], found["xla"]).values()) < FLOAT32
    monkeypatch.setattr(programs, "run", None)  # whoever calls it, fails
    made["pallas"](x)
    LAYERS[name](heads=2)(x, training=True)
    with pytest.raises(TypeError):
        made["pallas"](x, training=True)


@tiers.full_on_jax
def test_one_line_says_what_it_needs():
    x = ops.ones((1, 16, 64))
    for name, layer in LAYERS.items():
        title = layer.__name__
        with pytest.raises(ValueError, match=rf"{title}: implementation 'pallas' needs an NVIDIA GPU of compute cap"):
            layer(heads=2, implementation="pallas")(x, training=True)
        with pytest.raises(ValueError, match=rf"{title}: implementation must be one of auto, xla, pallas, got 'cuda'"):
            layer(implementation="cuda")
        narrow = layer(heads={"gla": 4, "retention": 8}[name], implementation="pallas")
        with pytest.raises(ValueError, match="multiples of 16 wide, got float32, keys of 8 and values of 16"):
            narrow(x, training=True)
    with pytest.raises(ValueError, match="implementation 'pallas' needs gates 'key', got 'both'"):
        GatedLinearAttention(gates="both", implementation="pallas")
    GatedLinearAttention(heads=2, gates="both")(x, training=True)


@pytest.mark.skipif((nvidia.capability() or (0, 0)) < nvidia.HOPPER, reason="needs an NVIDIA GPU from Hopper on")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("b", "n"), [(8, 2048), (2, 1001)])
@pytest.mark.parametrize("name", FORMS)
def test_a_layer_on_a_gpu_trains_with_it_as_with_einsums(name, b, n, layout):
    x = ops.cast(np.random.default_rng(0).normal(size=(b, n, 768)), "bfloat16")
    made = by_implementation(LAYERS[name], x.shape, dtype="bfloat16")
    own = made["xla"].sizes()
    m = decayed.sizes((b, n, own["h"], own["e"]), own["s"], made["xla"].shared, "bfloat16")
    if (found := decayed.obstacle(m)) is not None:
        pytest.skip(f"the kernels need {found}")
    masked = backends.tensors(masks(layout, b, n), "float32")
    found = {value: step(layer, x, masked, compiled=True) for value, layer in made.items()}
    exact = step(by_implementation(LAYERS[name], x.shape)["xla"], ops.cast(x, "float32"), masked, compiled=True)
    error = {value: errors(found[value], exact) for value in found}
    assert all(error["pallas"][key] < BFLOAT16_FACTOR * e for key, e in error["xla"].items()), error


@pytest.mark.skipif(tiers.ON_JAX, reason="it was measured in TensorFlow")
def test_auto_takes_it_where_it_was_measured_to_be_faster():
    of = lambda b, n, heads, s, e, dtype="bfloat16": decayed.sizes((b, n, heads, e), s, False, dtype)  # noqa: E731
    measured = [of(8, 8192, 12, 64, 64), of(128, 512, 12, 64, 64), of(4, 2048, 4, 96, 192), of(1, 65_536, 4, 192, 384)]
    assert all(map(decayed.is_faster, measured))
    others = [of(8, 8192, 4, 96, 192, "float32"), of(4, 1024, 4, 96, 192), of(8, 8192, 4, 256, 512)]
    others += [of(8, 8192, 4, 80, 160), of(8, 8192, 48, 16, 16)]
    assert not any(map(decayed.is_faster, others))
