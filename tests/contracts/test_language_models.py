"""What every language model must satisfy, on every backend, beside what every model must."""

import inspect
import re

import keras
import numpy as np
import pytest

from flash_tf.layers.mixers import MIXERS
from flash_tf.models import MODELS
from tests import tiers
from tests.backends import on_jax_compiled, to_numpy
from tests.contracts.test_mixers import TWO
from tests.contracts.test_models import MIXER, SMALL, B, C, D, N, V, each_position, model_of, token_ids
from tests.numerics import FLOAT32, relative_error

KINDS = [name for name in MODELS.names() if MODELS.get(name).predicts_tokens]
each_model = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("kind", tiers.thinned(KINDS, "masked_lm"))  # the other reads the same dictionary, and one less
@tiers.full_on_jax
def test_fit_on_dictionaries_makes_the_loss_fall_in_one_epoch(kind):
    model, rng = model_of(kind, depth=1), np.random.default_rng(0)
    text = (rng.integers(0, V, [64, 1]) + np.arange(N + 1)).astype("int32") % V  # each token is the one before plus 1
    x, y = {"token_ids": text[:, :-1], "padding_mask": np.ones([64, N], bool)}, text[:, 1:]
    if "masked_positions" in inspect.signature(model.call).parameters:
        x["masked_positions"] = np.tile(np.arange(0, N, 4, dtype="int32"), (64, 1))
        y = np.take_along_axis(y, x["masked_positions"], axis=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    before = float(loss(y, model(x)))
    model.compile(keras.optimizers.AdamW(1e-2), loss)
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    assert float(loss(y, model(x))) < before - 1


def test_training_a_model_that_began_from_another_leaves_that_one_whole():
    source, model = model_of("causal_lm", depth=1), model_of("causal_lm", depth=1)
    ids, before = token_ids(B, N), [to_numpy(v.value) for v in source.variables]
    model.init_from(source)
    model.compile(keras.optimizers.SGD(1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(ids, ids, verbose=0)  # which on JAX takes the arrays that it trains
    assert all(np.array_equal(to_numpy(v.value), x) for v, x in zip(source.variables, before, strict=True))
    assert any(not np.array_equal(to_numpy(v.value), x) for v, x in zip(model.variables, before, strict=True))


def test_masked_positions_equal_gathering_from_all_logits():
    model, ids = model_of("masked_lm"), token_ids(B, N)
    at = np.array([[0, 5, 5, N - 1], [7, 3, 0, 12]], "int32")  # repeated and in no order
    want = np.take_along_axis(to_numpy(model(ids)), at[..., None], axis=1)
    got = to_numpy(model(ids, masked_positions=at))
    assert got.shape == (B, 4, V) and relative_error(got, want) < FLOAT32


@each_model
def test_one_embedding_serves_both_ends(kind):
    model, ids = model_of(kind), token_ids(B, N)
    assert [tuple(v.shape) for v in model.trainable_variables].count((V, D)) == 1
    x = np.random.default_rng(1).normal(size=[B, N, D]).astype("float32")
    encoded, logits = to_numpy(model.encode(ids)), to_numpy(model.head(x))
    bias = to_numpy(model.output_bias.value)
    table = to_numpy(model.embedding.embeddings.value)
    assert relative_error(logits, x @ table.T + bias) < FLOAT32
    model.embedding.embeddings.assign(table[::-1])
    assert relative_error(to_numpy(model.head(x)), x @ table[::-1].T + bias) < FLOAT32
    assert relative_error(to_numpy(model.encode(V - 1 - ids)), encoded) < FLOAT32


@tiers.full_on_jax
@each_position
def test_a_document_packed_in_a_row_equals_itself_alone(positions):
    model, ids = model_of("causal_lm", **positions), token_ids(B, 5 * C)
    segment_ids = np.zeros([B, 5 * C], "int32")
    documents = {4: (0, 2 * C + 1), 2: (3 * C, C), 7: (4 * C, C - 2)}  # name -> first, length; padding between
    for name, (first, length) in documents.items():
        segment_ids[:, first : first + length] = name
    read = on_jax_compiled(lambda ids, **given: model(ids, **given))
    packed = to_numpy(read(ids, segment_ids=segment_ids))
    assert C == model.align
    for first, length in documents.values():
        span = slice(first, first + length)
        assert relative_error(packed[:, span], to_numpy(read(ids[:, span]))) < FLOAT32


@tiers.full_on_jax
@each_model
@pytest.mark.parametrize("mixer", MIXERS.names())
def test_a_model_is_causal_exactly_when_it_says_so(kind, mixer):
    options = {"heads": 2, "chunk_size": C, "key_dim": 16, "mixers": list(TWO)}
    takes = inspect.signature(MIXERS.get(mixer)).parameters
    mixed = {"type": mixer, **{k: v for k, v in options.items() if k in takes}}
    refused = {
        "causal_only": (False, r"^\w+ reads a text both ways, which mixer '\w+' cannot: take another mixer$"),
        "never_causal": (True, r"^\w+ reads the whole text: it needs causal false, got True$"),
    }
    for attribute, (causal, message) in refused.items():
        if getattr(MIXERS.get(mixer), attribute, False) and MODELS.get(kind).causal == causal:
            with pytest.raises(ValueError, match=message):
                model_of(kind, mixer=mixed)
            return
    model, ids = model_of(kind, mixer=mixed), token_ids(B, N)
    changed = np.where(np.arange(N) < 20, ids, (ids + 1) % V)
    same = relative_error(to_numpy(model(changed))[:, :20], to_numpy(model(ids))[:, :20]) < FLOAT32
    assert same == model.causal == (model.decode_state_bytes(N) is not None)


@pytest.mark.one_backend
def test_token_ids_of_another_shape_are_one_clear_error():
    model, ids = model_of("causal_lm"), token_ids(B, N)
    for wrong in (ids[0], ids[None]):
        with pytest.raises(ValueError, match=re.escape(f"needs token ids of the shape [b, n], got {wrong.shape}")):
            model.encode(wrong)


@pytest.mark.one_backend
@each_model
def test_a_replica_may_have_no_row(kind):
    """The last batch of an epoch has too few for all."""
    model, ids = model_of(kind), token_ids(B, N)
    assert to_numpy(model(ids[:0])).shape == (0, *to_numpy(model(ids)).shape[1:])


@each_model
@pytest.mark.parametrize(("wrong", "message"), [
    ({"position_embedding": "learned"}, "'learned' needs max_length.* got max_length None with 'learned'"),
    ({"max_length": 9}, "no other takes it.* got max_length 9 with 'scaled_sin'"),
    ({"position_embedding": "rotary"}, "position_embedding must be 'scaled_sin', 'learned' or null, got 'rotary'"),
    ({"depth": 0}, "needs depth >= 1 and <= 1024, got 0"),
    ({"vocabulary_size": 0}, "needs vocabulary_size >= 1 and <= 2147483647, got 0"),
    ({"norm": "batch_norm"}, "norm must be one of scale_norm, layer_norm, .*, simple_rms_norm, got 'batch_norm'"),
    ({"dropout": 1.0}, "needs 0 <= dropout < 1, got 1.0"),
    ({"widht": 3}, "has no option 'widht'; did you mean 'width'?"),
    ({"mixer": {"type": "flahs"}}, "no mixer is called 'flahs'; did you mean 'flash'?"),
    ({"mixer": {**MIXER, "chunksize": 3}}, "mixer 'flash' has no option 'chunksize'; did you mean 'chunk_size'?"),
    ({"mixer": {**MIXER, "key_dim": True}}, "key_dim must be int, got True"),
    ({"feedforward": {"type": "glue"}}, "no feedforward is called 'glue'; did you mean 'glu'?"),
])  # fmt: skip
def test_a_wrong_option_is_named_with_what_was_needed(kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        MODELS.build({"type": kind, **SMALL, **wrong})


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, texts):
        return [np.array([ord(c) - 96 for c in text], "int32") for text in texts]


@each_model
@tiers.full_on_jax
def test_texts_are_encoded_as_each_alone(kind):
    model = model_of(kind)
    with pytest.raises(ValueError, match="it has no tokenizer"):
        model.encode("abc")
    model.tokenizer = Letters()
    found = to_numpy(model.encode(["abcde", "xy"]))
    for row, text in zip(found, ("abcde", "xy"), strict=True):
        want = to_numpy(model.encode(Letters().encode([text])[0][None]))[0]
        assert relative_error(row[: len(text)], want) < FLOAT32
        assert not row[len(text) :].any()
        assert relative_error(to_numpy(model.encode(text))[0], want) < FLOAT32
    with pytest.raises(ValueError, match="the text '' has no tokens"):
        model.encode(["a", ""])
