"""The gated attention unit between two texts."""

import keras
import numpy as np
import pytest

from flash_tf.layers import CrossGatedAttention
from kernels_xla.gau_cross import gau_cross_attention
from tests.backends import tensors, to_numpy, value_and_gradients
from tests.numerics import BFLOAT16_LAYER, FLOAT32, relative_error
from tests.oracles import ORACLES

B, N, M, D, W = 2, 9, 13, 16, 12


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def built(dtype="float32", **options):
    layer = CrossGatedAttention(**{"key_dim": 8, "expansion": 2, **options}, dtype=dtype)
    layer.build((B, N, D), (B, M, W))
    rng = np.random.default_rng(6)
    for weight in layer.weights:
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * rng.normal(size=weight.shape))
    return layer


def outputs(layer, x, memory, **masked):
    found = tensors({"x": x, "memory": memory}, "float32")
    return to_numpy(layer(found["x"], found["memory"], **tensors(masked, "float32")))


def test_the_layer_is_its_formula():
    layer, x, memory = built(), normal(B, N, D), normal(B, M, W, seed=1)
    silu = lambda y: y / (1 + np.exp(-y))  # noqa: E731
    dense = lambda part, y: y @ to_numpy(part.kernel) + to_numpy(part.bias)  # noqa: E731
    u, z = np.split(silu(dense(layer.query_projection, x)), [2 * D], axis=-1)
    v, z_memory = np.split(silu(dense(layer.memory_projection, memory)), [2 * D], axis=-1)
    weights = {w.name: to_numpy(w) for part in (layer.query_scale, layer.key_scale) for w in part.weights}
    q, k = z * weights["gamma_q"] + weights["beta_q"], z_memory * weights["gamma_k"] + weights["beta_k"]
    attended = ORACLES["gau_cross"](q[:, :, None], k[:, :, None], v[:, :, None])[:, :, 0]
    assert relative_error(outputs(layer, x, memory), dense(layer.out_projection, u * attended)) < FLOAT32


def test_padding_of_the_memory_is_neither_read_nor_counted():
    layer, x, memory = built(), normal(B, N, D), normal(B, M, W, seed=1)
    real = np.broadcast_to(np.arange(M) < 6, (B, M))
    dirty = np.where(real[..., None], memory, 1e4 * normal(B, M, W, seed=2))
    found = outputs(layer, x, dirty, memory_mask=real)
    assert np.array_equal(found, outputs(layer, x, memory, memory_mask=real))
    assert relative_error(found, outputs(layer, x, memory[:, :6])) < FLOAT32


def test_a_row_whose_memory_is_all_padding_reads_nothing():
    arrays = {name: normal(B, length, 1, 4, seed=i) for i, (name, length) in enumerate((("q", N), ("k", M), ("v", M)))}
    real = np.stack([np.zeros(M, bool), np.ones(M, bool)])
    given = tensors({**arrays, "memory_mask": real}, "float32")
    function = lambda q, k, v: gau_cross_attention(q, k, v, memory_mask=given["memory_mask"])  # noqa: E731
    floats = {name: given[name] for name in arrays}
    out, gradients = value_and_gradients(function, floats, lambda shape: normal(*shape, seed=5))
    assert not to_numpy(out)[0].any() and to_numpy(out)[1].any()
    assert all(np.isfinite(to_numpy(g)).all() for g in gradients.values())
    assert relative_error(to_numpy(out), ORACLES["gau_cross"](**arrays, memory_mask=real)) < FLOAT32


def test_a_token_sees_no_other_token_of_its_own_text():
    layer, x, memory = built(), normal(B, N, D), normal(B, M, W, seed=1)
    assert relative_error(outputs(layer, x, memory)[:, 4:5], outputs(layer, x[:, 4:5], memory)) < FLOAT32


def test_bfloat16_is_close():
    x, memory = normal(B, N, D), normal(B, M, W, seed=1)
    narrow = outputs(built("mixed_bfloat16"), x, memory)
    assert relative_error(narrow, outputs(built(), x, memory)) < BFLOAT16_LAYER


def test_it_comes_back_from_a_file_with_its_options(tmp_path):
    inputs = keras.Input((None, D)), keras.Input((None, W))
    layer = built(key_dim=6, expansion=3)
    keras.Model(inputs, layer(*inputs)).save(tmp_path / "cross.keras")
    again = keras.saving.load_model(tmp_path / "cross.keras")
    x, memory = normal(B, N, D), normal(B, M, W, seed=1)
    assert np.array_equal(to_numpy(again([x, memory])), outputs(layer, x, memory))
    assert (again.layers[-1].key_dim, again.layers[-1].expansion) == (6, 3)


def test_texts_of_other_numbers_of_rows_are_one_clear_error():
    with pytest.raises(ValueError, match="needs a memory of 2 rows, as x, got 1"):
        CrossGatedAttention(key_dim=4)(np.ones((2, 3, 8), "float32"), np.ones((1, 5, 8), "float32"))


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="needs key_dim and expansion >= 1, got 0 and 2"):
        CrossGatedAttention(key_dim=0)
