"""The head's loss in blocks, against float64 NumPy."""

import functools

import keras
import numpy as np
import pytest

from kernels_xla.common.cross_entropy import cross_entropy, of_block
from tests import numerics
from tests.backends import compiled, tensors, to_numpy, value_and_gradients

T, D, V = 36, 12, 50


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    arrays = {"x": rng.normal(size=(T, D)), "table": rng.normal(size=(V, D)), "bias": rng.normal(size=V)}
    weights = (rng.random(T) < 0.7) * rng.random(T)
    return {k: a.astype("float32").astype("float64") for k, a in arrays.items()}, rng.integers(0, V, T), weights


def oracle(x, table, bias, labels, weights):
    """The sum and its gradients by hand: d/dl = w (softmax(l) - onehot)."""
    logits = x @ table.T + bias
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_likelihoods = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = -(weights * log_likelihoods[np.arange(len(x)), labels]).sum()
    surplus = weights[:, None] * (np.exp(log_likelihoods) - (np.arange(len(table)) == labels[:, None]))
    return {"value": loss, "x": surplus @ table, "table": surplus.T @ x, "bias": surplus.sum(axis=0)}


def measured(block, dtype="float32", wrap=lambda f: f, cotangent=1.0, **options):
    arrays, labels, weights = inputs()
    labels = keras.ops.convert_to_tensor(labels, "int32")
    weights = keras.ops.convert_to_tensor(weights, "float32")
    in_blocks = functools.partial(cross_entropy, block=block, **options)
    loss = wrap(lambda x, table, bias, labels: in_blocks(x, table, bias, labels, weights))
    arguments = {**tensors(arrays, dtype), "labels": labels}
    value, gradients = value_and_gradients(
        lambda **given: loss(*(given[name] for name in arguments)), arguments, lambda shape: np.full(shape, cotangent)
    )
    return {"value": to_numpy(value), **{name: to_numpy(g) for name, g in gradients.items()}}


def expected():
    arrays, labels, weights = inputs()
    return oracle(**arrays, labels=labels, weights=weights)


@pytest.mark.parametrize("block", [1, 8, T, 100])
@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["plain", "xla"])
def test_value_and_gradients_equal_the_oracle_in_blocks_of_any_size(block, wrap):
    found = numerics.errors(measured(block, wrap=wrap), expected())
    assert max(found.values()) < numerics.FLOAT32, found


@pytest.mark.parametrize("block", [2, 100])
def test_blocks_may_take_their_tokens_from_equal_parts(block):
    found = numerics.errors(measured(block, devices=3), expected())
    assert max(found.values()) < numerics.FLOAT32, found


def test_gradients_scale_with_what_the_loss_goes_into():
    want = expected()
    found = numerics.errors(
        measured(8, cotangent=-3.0), {**{n: -3 * g for n, g in want.items()}, "value": want["value"]}
    )
    assert max(found.values()) < numerics.FLOAT32, found


def test_bfloat16_activations_lose_a_dozen_roundings_and_the_loss_stays_float32():
    found = numerics.errors(measured(8, "bfloat16"), expected())
    assert max(found.values()) < numerics.BFLOAT16_LAYER, found


def test_logits_in_the_thousands_do_not_overflow():
    arrays, labels, weights = inputs()
    logits = 1000 * arrays["x"] @ arrays["table"].T + arrays["bias"]
    largest = logits.max(axis=1)
    normalizer = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    want = (weights * (normalizer - logits[np.arange(T), labels])).sum()
    t = tensors({**arrays, "x": 1000 * arrays["x"]}, "float32")
    got = cross_entropy(t["x"], t["table"], t["bias"], keras.ops.convert_to_tensor(labels, "int32"), weights)
    assert abs(to_numpy(got) / want - 1) < numerics.FLOAT32


def test_no_bias_is_a_bias_of_zeros():
    arrays, labels, weights = inputs()
    want = oracle(**{**arrays, "bias": np.zeros(V)}, labels=labels, weights=weights)["value"]
    x, table = (tensors(arrays, "float32")[name] for name in ("x", "table"))
    got = cross_entropy(x, table, None, keras.ops.convert_to_tensor(labels, "int32"), np.float32(weights), block=8)
    assert numerics.relative_error(to_numpy(got), want) < numerics.FLOAT32


def test_a_program_has_one_block_for_all():
    """Else XLA compiles each, and may have the logits of several in memory together."""
    traced, counts = [], []
    for size in (T, 2):
        traced.clear()
        measured(size, wrap=compiled, of_block=lambda *inputs: traced.append(None) or of_block(*inputs))
        counts.append(len(traced))
    assert 0 < counts[0] and counts[1] <= 2 * counts[0]  # JAX traces a loop's body once more for its shapes
