"""A block's fused norm is the norm's function, in value and every gradient. Pallas interprets it."""

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import GLU
from flash_tf.layers.block import NORMS, ResidualBlock
from flash_tf.models import CausalLM
from kernels_pallas import norms as fused
from kernels_pallas import programs
from kernels_xla.common import nvidia
from tests import backends, tiers
from tests.fused import step
from tests.numerics import ALIVE, BFLOAT16_FACTOR, FLOAT32, errors

SHAPE = 2, 48, 192  # three tiles of columns
EPSILON = 0.1  # so large that its place shows


def drawn(shape=SHAPE):
    rng = np.random.default_rng(0)
    d = shape[-1]
    arrays = {"x": rng.normal(size=shape) + 1, "gamma": rng.normal(size=d), "beta": rng.normal(size=d)}
    return {name: a.astype("float32").astype("float64") for name, a in arrays.items()}


def cotangents(shape):
    """Of the tokens, and of their norm."""
    return np.random.default_rng(1).normal(size=(2, *shape))


def oracle(x, gamma, beta, centered, given=None):
    """The norm, and the gradients of sum(tokens * first + norm * second), by each token's Jacobian."""
    d = x.shape[-1]
    first, second = cotangents(x.shape) if given is None else given
    center = np.eye(d) - centered / d
    y, dx, dgamma = np.zeros_like(x), np.zeros_like(x), np.zeros(d)
    for at in np.ndindex(x.shape[:-1]):
        u = center @ x[at]
        length = np.sqrt(u @ u / d + EPSILON)
        y[at] = gamma * u / length + beta
        jacobian = gamma[:, None] * (np.eye(d) / length - np.outer(u, u) / d / length**3) @ center
        dx[at] = first[at] + jacobian.T @ second[at]
        dgamma += second[at] * u / length
    return {"value": np.stack([x, y]), "x": dx, "gamma": dgamma, "beta": second.sum((0, 1))}


def measured(arrays, centered, dtype="float32", norm=None, given=None):
    """Value and gradients, of the tokens beside `norm` if there is one. `given` are cotangents."""

    def both(x, gamma, beta):
        if norm is None:
            return ops.stack(fused.with_norm(x, gamma, beta, centered=centered, epsilon=EPSILON))
        return ops.stack([x, norm(x, gamma, beta)])

    cotangent = lambda shape: cotangents(shape[1:]) if given is None else given  # noqa: E731
    value, gradients = backends.value_and_gradients(both, backends.tensors(arrays, dtype), cotangent)
    return {"value": backends.to_numpy(value), **{name: backends.to_numpy(g) for name, g in gradients.items()}}


def einsums(centered):
    def norm(x, gamma, beta):
        if centered:
            return ops.cast(ops.layer_normalization(x, gamma, beta, epsilon=EPSILON), x.dtype)
        return ops.rms_normalization(x, gamma, epsilon=EPSILON) + beta

    return norm


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("shape", [SHAPE, (1, 7, 64), (2, 2, 1024)])
def test_it_is_the_oracle_in_value_and_every_gradient(shape, centered, interpreted):
    arrays = drawn(shape)
    want = oracle(**arrays, centered=centered)
    found = errors(measured(arrays, centered), want)
    assert max(found.values()) < FLOAT32, found
    assert min(np.count_nonzero(x) / x.size for x in want.values()) > ALIVE


@tiers.full_on_jax
@pytest.mark.parametrize("centered", [True, False])
def test_in_bfloat16_it_is_as_exact_as_the_einsums(centered, interpreted):
    arrays = drawn()
    want = oracle(**arrays, centered=centered)
    found, least = (errors(measured(arrays, centered, "bfloat16", norm), want) for norm in (None, einsums(centered)))
    assert all(found[name] < BFLOAT16_FACTOR * least[name] for name in found), (found, least)


def blocks(kind, dtype="float32", inner=GLU, **options):
    """A block for each implementation, with the same weights, none at its start."""
    found, rng = {}, np.random.default_rng(2)
    options |= {} if kind == "simple_rms_norm" else {"norm_epsilon": EPSILON}
    for name in ("xla", "pallas"):
        given = {**options, "norm": kind, "norm_implementation": name, "dtype": dtype}
        found[name] = ResidualBlock(inner(dtype=dtype), **given, name="block")
        found[name].build((None, None, 64))
    weights = [w + 0.3 * rng.normal(size=w.shape) for w in found["xla"].get_weights()]
    for block in found.values():
        block.set_weights(weights)
    return found


@pytest.mark.parametrize("kind", tiers.thinned_on_jax(NORMS, "layer_norm"))
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_block_trains_with_every_norm_as_with_einsums(kind, dtype, interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    both, x = blocks(kind, dtype), np.random.default_rng(0).normal(size=(2, 8, 64))
    x = 1e-3 * x if kind == "simple_rms_norm" else x  # as small as the root of another epsilon
    x = ops.convert_to_tensor(x, both["xla"].compute_dtype)
    found = {name: step(block, x) for name, block in both.items()}
    exact = step(blocks(kind)["xla"], ops.cast(x, "float32"))
    error = {name: errors(got, exact) for name, got in found.items()}
    assert all(e < max(FLOAT32, BFLOAT16_FACTOR * error["xla"][name]) for name, e in error["pallas"].items()), error
    monkeypatch.setattr(programs, "run", None)  # whoever calls it, fails
    both["pallas"](x)
    ResidualBlock(GLU(), norm=kind, dtype=dtype)(x, training=True)
    with pytest.raises(TypeError):
        both["pallas"](x, training=True)


@tiers.full_on_jax
@pytest.mark.parametrize("centered", [True, False])
def test_in_bfloat16_each_number_is_rounded_once(centered, interpreted):
    rounded = lambda a: backends.to_numpy(ops.cast(ops.convert_to_tensor(a, "bfloat16"), "float32")).astype("float64")  # noqa: E731
    arrays = {name: rounded(a) for name, a in drawn().items()}
    arrays["x"] = rounded(arrays["x"] + 7)
    first, second = map(rounded, cotangents(SHAPE) * [[[[1]]], [[[8]]]])
    want = oracle(**arrays, centered=centered, given=(first, second))
    found = errors(measured(arrays, centered, "bfloat16", given=np.stack([first, second])), want)
    assert max(found.values()) < 2**-9, found


class Seen(keras.layers.Layer):
    """A branch that notes what it is called with."""

    given: dict

    def call(self, x, padding_mask=None, segment_ids=None, positions=None, training=None):
        self.given = {"segment_ids": segment_ids, "positions": positions, "training": training}
        return x


def test_the_branch_gets_the_same_arguments(interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    ids = ops.convert_to_tensor([[1, 1, 1, 2, 2, 0, 0, 0]], "int32")
    given = {"segment_ids": ids, "positions": ids, "training": True}
    seen = {}
    for name, block in blocks("scale_norm", inner=Seen).items():
        block(ops.ones((1, 8, 64)), **given)
        seen[name] = block.inner.given
    assert seen["pallas"]["training"] is seen["xla"]["training"] is True
    for name in ("segment_ids", "positions"):
        assert np.array_equal(*(backends.to_numpy(seen[one][name]) for one in seen))


@tiers.full_on_jax
@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 4, 64), (0, 8, 64)])
def test_a_block_takes_any_rank_and_an_empty_batch(shape, interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=shape), "float32")
    got, want = (backends.to_numpy(block(x, training=True)) for block in reversed(blocks("layer_norm").values()))
    assert got.shape == want.shape == shape
    assert not got.size or errors({"out": got}, {"out": want})["out"] < FLOAT32


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "scale_norm"])
def test_parameters_have_the_dtype_that_the_norm_itself_reads(kind, interpreted, monkeypatch):
    """LayerNormalization reads float32, RMSNormalization what the policy says."""
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    both, x = blocks(kind, "mixed_bfloat16"), np.random.default_rng(0).normal(size=(2, 8, 64))
    x = ops.convert_to_tensor(x, "bfloat16")
    seen, run = {}, programs.run
    monkeypatch.setattr(
        programs, "run", lambda name, m, x, gamma, *rest: seen.update(gamma=gamma) or run(name, m, x, gamma, *rest)
    )
    both["pallas"](x, training=True)
    weight = both["pallas"].norm.trainable_variables[0]
    rounded = ops.cast(ops.cast(weight.value, "bfloat16"), "float32")
    want = weight.value if kind == "layer_norm" else rounded
    assert (backends.to_numpy(seen["gamma"]) == backends.to_numpy(want)).all()
    assert not np.array_equal(backends.to_numpy(rounded), backends.to_numpy(weight.value))


@tiers.full_on_jax
def test_a_model_passes_the_option_on_and_keeps_it(interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    mixer = {"type": "flash", "chunk_size": 8, "key_dim": 8}
    ids, found = ops.convert_to_tensor(np.random.default_rng(0).integers(0, 40, (2, 16)), "int32"), {}
    for name in ("xla", "pallas"):
        backends.seed(0)
        model = CausalLM(40, width=64, depth=2, mixer=mixer, dropout=0.1, norm="layer_norm", norm_implementation=name)
        assert CausalLM.from_config(model.get_config()).blocks[1].norm_implementation == name
        found[name] = backends.to_numpy(model(ids, training=True))
    assert errors({"logits": found["pallas"]}, {"logits": found["xla"]})["logits"] < FLOAT32
    monkeypatch.setattr(programs, "run", None)
    with pytest.raises(TypeError):
        model(ids, training=True)


@tiers.full_on_jax
def test_one_line_says_what_it_needs():
    x, needs = ops.ones((1, 16, 64)), "ResidualBlock: norm_implementation 'pallas' needs "
    fused_block = lambda **options: ResidualBlock(GLU(), norm_implementation="pallas", **options)  # noqa: E731
    with pytest.raises(ValueError, match=needs + r"an NVIDIA GPU of compute capability 9\.0 or more, got none"):
        fused_block()(x, training=True)
    for width in (72, 1088):
        with pytest.raises(ValueError, match=f"{needs}bfloat16 or float32, and a width .*, got float32, .* {width:,}"):
            fused_block()(ops.ones((1, 16, width)), training=True)
    with pytest.raises(ValueError, match=needs + "bfloat16 or float32, .*, got float16, a width of 64"):
        fused_block(dtype="float16")(x, training=True)
    with pytest.raises(ValueError, match="norm_implementation must be one of auto, xla, pallas, got 'cuda'"):
        ResidualBlock(GLU(), norm_implementation="cuda")
    for option, said in (("post_norm", "a norm before the branch, got post_norm true"), ("remat", "remat false")):
        block = fused_block(**{option: True})
        with pytest.raises(ValueError, match=needs + said):
            block(x, training=True)
        with pytest.raises(ValueError, match=needs + said):
            block.check_training(1, 16)
    block = fused_block()
    with pytest.raises(ValueError, match="check_training needs a built block"):
        block.check_training(1, 16)
    block.build((None, None, 64))
    with pytest.raises(ValueError, match=needs + r"a static shape, got \(None, 16, 64\)"):
        block.check_training(None, 16)
    ResidualBlock(GLU(), norm_implementation="auto", remat=True)(x, training=True)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_auto_takes_it_where_it_was_measured_to_be_faster(backend, monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    of = lambda tokens, width=768, dtype="bfloat16": fused.sizes((8, tokens // 8, width), dtype, True, 1e-5)  # noqa: E731
    timed = [of(65_536), of(8_192), of(65_536, 512), of(65_536, 1024)]
    assert {*map(fused.is_faster, timed)} == {backend == "tensorflow"}
    others = [of(8_192 - 64), of(65_536 + 8), of(32_768, 512), of(65_536, 640), of(65_536, dtype="float32")]
    assert not any(map(fused.is_faster, others))


@pytest.mark.skipif((nvidia.capability() or (0, 0)) < nvidia.HOPPER, reason="needs an NVIDIA GPU from Hopper on")
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("shape", [(8, 512, 768), (3, 100, 1024)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_it_is_as_exact_as_the_einsums(dtype, shape, centered):
    if (found := fused.obstacle(fused.sizes(shape, dtype, centered, EPSILON))) is not None:
        pytest.skip(f"the kernels need {found}")
    arrays = drawn(shape)
    want = measured(arrays, centered, "float64", einsums(centered))
    found, least = (errors(measured(arrays, centered, dtype, norm), want) for norm in (None, einsums(centered)))
    assert all(found[name] < max(FLOAT32, BFLOAT16_FACTOR * least[name]) for name in found), (found, least)
