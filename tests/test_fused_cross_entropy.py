"""The head's fused loss is the einsums' function, in value and every gradient. Pallas interprets it."""

import types

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.models import CausalLM
from flash_tf.training.objective import CausalObjective
from kernels_pallas import cross_entropy as fused
from kernels_pallas import programs
from kernels_xla.common import nvidia
from kernels_xla.common.cross_entropy import cross_entropy, of_block
from tests import backends, tiers
from tests.backends import compiled, tensors, to_numpy, value_and_gradients
from tests.numerics import ALIVE, BFLOAT16_FACTOR, FLOAT32, errors
from tests.test_cross_entropy import oracle

T, D, V = 150, 12, 192  # blocks that are no multiple of the kernels' step; three tiles of columns, taken together


def drawn(t=T, d=D, v=V, size=1.0):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(t, d)), "table": size * rng.normal(size=(v, d)), "bias": rng.normal(size=v)}
    arrays = {name: a.astype("float32").astype("float64") for name, a in arrays.items()}
    return arrays, rng.integers(0, v, t), ((rng.random(t) < 0.7) * rng.random(t)).astype("float32")


def measured(of_block, drawn, dtype="float32", block=T, wrap=lambda f: f):
    arrays, labels, weights = drawn
    labels, weights = ops.convert_to_tensor(labels, "int32"), ops.convert_to_tensor(weights)
    loss = wrap(lambda x, table, bias: cross_entropy(x, table, bias, labels, weights, block=block, of_block=of_block))
    value, gradients = value_and_gradients(
        lambda x, table, bias: loss(x, table, bias), tensors(arrays, dtype), lambda shape: np.full(shape, -2.0)
    )
    return {"value": to_numpy(value), **{name: to_numpy(g) for name, g in gradients.items()}}


def expected(drawn):
    arrays, labels, weights = drawn
    found = oracle(**arrays, labels=labels, weights=weights)
    return {name: x if name == "value" else -2 * x for name, x in found.items()}


@pytest.mark.parametrize("block", [T, 70])
@pytest.mark.parametrize("size", [1.0, 30.0])  # logits in the hundreds
@pytest.mark.parametrize("vocabulary", [V, 3 * V])
def test_it_is_the_oracle_in_value_and_every_gradient(vocabulary, size, block, interpreted):
    given = drawn(v=vocabulary, size=size)
    want = expected(given)
    found = errors(measured(fused.of_block, given, block=block), want)
    assert max(found.values()) < FLOAT32, found
    assert np.count_nonzero(want["bias"]) / vocabulary > ALIVE


def test_ids_that_never_come_do_not_make_nan_of_the_others(interpreted):
    arrays, labels, _ = given = drawn(v=3 * V)
    arrays["bias"][:V] = -np.inf  # the first tiles have no other ids
    labels[:] = V + labels % (2 * V)
    found = errors(measured(fused.of_block, given), expected(given))
    assert max(found.values()) < FLOAT32, found


@tiers.full_on_jax
def test_in_bfloat16_it_is_as_exact_as_the_einsums(interpreted):
    want = expected(drawn())
    found, least = (errors(measured(one, drawn(), "bfloat16"), want) for one in (fused.of_block, of_block))
    assert all(found[name] < BFLOAT16_FACTOR * least[name] for name in found), (found, least)


def causal(vocabulary):
    backends.seed(0)
    model = CausalLM(vocabulary, width=16, depth=1, mixer={"type": "flash", "chunk_size": 8, "key_dim": 8})
    model.build()
    return model


def objective(implementation):
    train = types.SimpleNamespace(loss_implementation=implementation)
    return CausalObjective(types.SimpleNamespace(train=train), types.SimpleNamespace(pad_id=0))


@tiers.full_on_jax
def test_a_causal_model_trains_with_it_as_with_einsums(interpreted, monkeypatch):
    monkeypatch.setattr(programs, "obstacle", lambda names, m: None)
    model = causal(V)
    batch = {"tokens": ops.convert_to_tensor(np.random.default_rng(0).integers(0, V, (3, 17)), "int32")}
    loss = lambda name: float(objective(name).loss(model, batch)[0])  # noqa: E731
    einsums = loss("xla")
    assert abs(loss("pallas") / einsums - 1) < FLOAT32
    monkeypatch.setattr(programs, "run", None)  # whoever calls it, fails
    assert loss("auto") == einsums
    with pytest.raises(TypeError):
        loss("pallas")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (V, r"an NVIDIA GPU of compute capability 9\.0 or more, got none"),
        (72, "bfloat16 or float32, and a vocabulary that is a multiple of 64, got float32, 72 ids"),
    ],
)
@tiers.full_on_jax
def test_one_line_says_what_it_needs(size, said):
    batch = {"tokens": ops.ones((1, 9), "int32")}
    with pytest.raises(ValueError, match=f"train.loss_implementation 'pallas' needs {said}"):
        objective("pallas").loss(causal(size), batch)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_auto_takes_it_where_it_was_measured_to_be_faster(backend, monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    timed = [fused.sizes(tokens, 32_000, "bfloat16") for tokens in (16_384, 9_832, 8_192)]
    timed += [fused.sizes(16_384, size, "bfloat16") for size in (32_128, 50_304)]
    others = [(8_064, 32_000, "bfloat16"), (9_832, 32_128, "bfloat16"), (16_384, 32_000, "float32")]
    others += [(16_384, size, "bfloat16") for size in (31_872, 50_432, 50_240)]
    assert {*map(fused.is_faster, timed)} == {backend == "tensorflow"}
    assert not any(fused.is_faster(fused.sizes(*other)) for other in others)


def test_it_needs_replicas_on_gpus(monkeypatch):
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    monkeypatch.setattr(nvidia, "capability", lambda: nvidia.HOPPER)
    strategy, found = tf.distribute.OneDeviceStrategy("CPU:0"), []
    strategy.run(lambda: found.append(fused.obstacle(fused.sizes(128, 64, "float32"))))
    assert found[0].startswith("replicas on GPUs alone, got") and found[0].endswith("CPU:0")


def test_where_programs_cannot_be_written_it_says_so(tmp_path, monkeypatch):
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").touch()
    (tmp_path / "programs").touch()  # no folder
    monkeypatch.setattr(programs, "HOME", tmp_path)
    monkeypatch.setattr(programs, "machine_obstacle", lambda: None)
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    assert "programs" in fused.obstacle(fused.sizes(128, 64, "float32"))


@pytest.mark.skipif((nvidia.capability() or (0, 0)) < nvidia.HOPPER, reason="needs an NVIDIA GPU from Hopper on")
@pytest.mark.parametrize(
    ("tokens", "block", "vocabulary"),
    [(2048, 2048, 4_096), (1000, 1000, 4_096), (600, 200, 32_000)],  # the last: a loop, padding, tiles five at a time
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_it_is_as_exact_as_the_einsums(dtype, tokens, block, vocabulary):
    if (found := fused.obstacle(fused.sizes(block, vocabulary, dtype))) is not None:
        pytest.skip(f"the kernels need {found}")
    given = drawn(tokens, 256, vocabulary, 0.1)
    want = expected(given)
    found, least = (errors(measured(one, given, dtype, block, compiled), want) for one in (fused.of_block, of_block))
    assert all(found[name] < BFLOAT16_FACTOR * least[name] for name in found), (found, least)
