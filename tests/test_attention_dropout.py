"""Dropout of attention weights: the weights of the formula times what a random layer made of ones."""

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import DiagAttention, MultiHeadSelfAttention, ResidualBlock
from flash_tf.models import MaskedLM
from kernels_xla import diag_attention, softmax_attention
from tests.backends import differentiate, to_numpy
from tests.numerics import FLOAT32, errors, inputs

B, N, H, D = 2, 12, 3, 12
X = np.random.default_rng(0).normal(size=[B, N, D]).astype("float32")
KEPT = (np.random.default_rng(1).random([B, H, N, N]) < 0.7) / 0.7
LAYERS = {
    "self_attention": lambda **options: MultiHeadSelfAttention(heads=2, **options),
    "grouped": lambda **options: MultiHeadSelfAttention(heads=4, kv_heads=2, rotary=False, **options),
    "softmax_plus": lambda **options: MultiHeadSelfAttention(heads=2, kernel="softmax_plus", **options),
    "diag_softmax": lambda **options: DiagAttention(heads=2, chunk_size=4, **options),
    "diag_relu": lambda **options: DiagAttention(heads=2, chunk_size=4, attention="relu", **options),
}


def kept(weights):
    return weights * ops.cast(KEPT, weights.dtype)


def formula(q, k, v, causal, weights):
    scores = ops.einsum("bihs,bjhs->bhij", q, k) / q.shape[-1] ** 0.5
    seen = np.tril(np.ones([N, N], bool)) if causal else np.ones([N, N], bool)
    if weights == "softmax":
        scores = ops.exp(scores) * ops.cast(seen, scores.dtype)
        scores = scores / ops.sum(scores, axis=-1, keepdims=True)
    else:
        scores = ops.relu(scores) * ops.cast(seen, scores.dtype)
    return ops.einsum("bhij,bjhe->bihe", kept(scores), v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "weights"),
    [(softmax_attention, "softmax"), (diag_attention, "softmax"), (diag_attention, "relu")],
    ids=["softmax_attention", "diag_softmax", "diag_relu"],
)
def test_dropped_weights_give_the_value_and_gradients_of_the_formula(kernel, weights, causal):
    case = {"dropout": kept, "causal": causal}
    case |= {"chunk_size": N, "weights": weights} if kernel is diag_attention else {}
    arrays = inputs(kernel.SPEC, b=B, n=N, h=H)
    got = differentiate(kernel.SPEC.fast, case, arrays)
    want = differentiate(formula, {"causal": causal, "weights": weights}, arrays, dtype="float64")
    assert max(errors(got, want).values()) < FLOAT32


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_of_weights_acts_in_training_alone_and_follows_from_its_seed(kind):
    layer, plain = LAYERS[kind](attention_dropout=0.5), LAYERS[kind]()
    outs, x = [], ops.convert_to_tensor(X)
    layer.build(x.shape)
    plain.build(x.shape)
    plain.set_weights(layer.get_weights()[: len(plain.weights)])
    for seed in (1, 1, 2):
        layer.dropout.seed_generator.state.assign([0, seed])
        outs.append(to_numpy(layer(x, training=True)))
    assert np.array_equal(outs[0], outs[1]) and not np.allclose(outs[0], outs[2])
    assert np.array_equal(to_numpy(layer(x)), to_numpy(plain(x)))


def test_what_cannot_be_done_with_dropout_of_weights_is_said_in_a_line():
    with pytest.raises(ValueError, match="needs 0 <= attention_dropout < 1, got 1.0"):
        DiagAttention(attention_dropout=1.0)
    with pytest.raises(ValueError, match="attention_dropout needs a softmax, got kernel 'relu2'"):
        MultiHeadSelfAttention(kernel="relu2", attention_dropout=0.1)
    said = "DiagAttention needs attention_dropout 0 to be recomputed in the backward pass, got 0.1"
    with pytest.raises(ValueError, match=said):
        ResidualBlock(DiagAttention(attention_dropout=0.1), remat=True)
    mixer = {"type": "diag_attention", "heads": 2, "attention_dropout": 0.1}
    with keras.RematScope(mode="full"):
        model = MaskedLM(vocabulary_size=20, width=8, depth=1, mixer=mixer)
        with pytest.raises(ValueError, match=said):
            model(ops.zeros((1, 4), "int32"))
