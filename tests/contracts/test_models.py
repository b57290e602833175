"""What every language model must satisfy, on every backend. A new file in flash_tf/models is tested here."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers.mixers import MIXERS
from flash_tf.models import MODELS
from tests.backends import to_numpy
from tests.contracts.test_mixers import TWO
from tests.numerics import BFLOAT16_LAYER, FLOAT32, relative_error

B, N, V, D, C = 2, 37, 50, 32, 8
MIXER = {"type": "mixed_chunk", "chunk_size": C, "key_dim": 16}
SMALL = {"vocabulary_size": V, "width": D, "depth": 2, "mixer": MIXER}
CHANGED = {  # none at its default
    "feedforward": {"type": "mlp", "hidden": 24},
    "position_embedding": "learned",
    "max_length": N,
    "dropout": 0.25,
    "remat": True,
    "embedding_norm": "layer_norm",
    "head_bias": False,
    "head_norm": "rms_norm",
    "head_projection": True,
}
each_model = pytest.mark.parametrize("kind", MODELS.names())
each_position = pytest.mark.parametrize(
    "positions", [{}, {"position_embedding": "learned", "max_length": 5 * C}, {"position_embedding": None}], ids=str
)


def signature(kind):
    return inspect.signature(MODELS.get(kind)).parameters


def model_of(kind, **options):
    """A small model with the same weights every time."""
    model = MODELS.build({"type": kind, **SMALL, **options})
    model.build()
    rng = np.random.default_rng(6)
    for weight in model.trainable_variables:
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * rng.normal(size=weight.shape))
    return model


def token_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape).astype("int32")


def other_norm(kind):
    return "layer_norm" if signature(kind)["norm"].default == "scale_norm" else "scale_norm"


@each_model
def test_every_option_is_in_the_config_and_survives_a_round_trip(kind):
    options = {**SMALL, **CHANGED, "norm": other_norm(kind)}
    parameters = {name: p.default for name, p in signature(kind).items() if name != "kwargs"}
    assert options.keys() == parameters.keys()
    assert all(options[name] != default for name, default in parameters.items())
    model = model_of(kind, **options)
    config = model.get_config()
    assert {name: config[name] for name in options} == options
    again = type(model).from_config(config)
    again.build()
    again.set_weights(model.get_weights())
    assert again.get_config() == config
    assert np.array_equal(to_numpy(again(token_ids(B, N))), to_numpy(model(token_ids(B, N))))


@each_model
@pytest.mark.parametrize("options", [{}, CHANGED], ids=["plain", "changed"])
def test_a_saved_model_comes_back_as_another_object_with_equal_outputs(kind, options, tmp_path):
    model, ids = model_of(kind, **options), token_ids(B, N)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again is not model and type(again) is type(model)
    assert {v.path for v in again.trainable_variables} == {v.path for v in model.trainable_variables}
    assert np.array_equal(to_numpy(again(ids)), to_numpy(model(ids)))


@each_model
def test_a_model_is_a_part_of_another_model_of_unknown_length(kind):
    model, ids = model_of(kind), token_ids(B, N)
    tokens = keras.Input((None,), dtype="int32")
    whole = keras.Model(tokens, model(tokens))
    assert whole.output_shape == (None, None, V)
    assert relative_error(to_numpy(whole(ids)), to_numpy(model(ids))) < FLOAT32


@each_model
def test_a_dictionary_of_arguments_equals_the_arguments(kind):
    model, ids = model_of(kind), token_ids(B, N)
    arguments = {"padding_mask": np.arange(N) < np.array([[N], [20]]), "positions": np.arange(N)[None] + 3}
    want = to_numpy(model(ids, **arguments))
    assert want.shape == (B, N, V)
    assert np.array_equal(to_numpy(model({"token_ids": ids, **arguments})), want)
    assert relative_error(want, to_numpy(model(ids))) > FLOAT32


@each_model
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


@each_model
def test_mixed_bfloat16_keeps_float32_weights_and_close_logits(kind):
    model, ids = model_of(kind), token_ids(B, N)
    mixed = model_of(kind, dtype="mixed_bfloat16")
    assert {v.dtype for v in mixed.trainable_variables} == {"float32"}
    logits = mixed(ids)
    assert keras.backend.standardize_dtype(logits.dtype) == "bfloat16"
    assert relative_error(to_numpy(logits), to_numpy(model(ids))) < 2 * BFLOAT16_LAYER  # two layers


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


@pytest.mark.slow
@each_model
def test_recomputing_changes_neither_logits_nor_gradients(kind):
    ids, found = token_ids(B, N), []
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for remat in (False, True):
        model = model_of(kind, depth=1, remat=remat)
        before = model.get_weights()
        out = to_numpy(model(ids, training=True))
        model.compile(keras.optimizers.SGD(1e4), loss)
        model.train_on_batch({"token_ids": ids}, token_ids(B, N, seed=1))
        found.append((out, [new - old for new, old in zip(model.get_weights(), before, strict=True)]))
    (out, deltas), (again, recomputed) = found
    assert relative_error(again, out) < FLOAT32
    for delta, other in zip(deltas, recomputed, strict=True):
        assert np.any(delta) and relative_error(other, delta) < FLOAT32


@each_position
def test_a_document_packed_in_a_row_equals_itself_alone(positions):
    model, ids = model_of("causal_lm", **positions), token_ids(B, 5 * C)
    segment_ids = np.zeros([B, 5 * C], "int32")
    documents = {4: (0, 2 * C + 1), 2: (3 * C, C), 7: (4 * C, C - 2)}  # name -> first, length; padding between
    for name, (first, length) in documents.items():
        segment_ids[:, first : first + length] = name
    packed = to_numpy(model(ids, segment_ids=segment_ids))
    assert C == model.align
    for first, length in documents.values():
        span = slice(first, first + length)
        assert relative_error(packed[:, span], to_numpy(model(ids[:, span]))) < FLOAT32


@each_model
@each_position
def test_padding_on_the_right_equals_a_shorter_text(kind, positions):
    model, ids = model_of(kind, **positions), token_ids(B, N)
    mask = np.arange(N) < np.array([[N - 6], [9]])
    got = to_numpy(model(ids, padding_mask=mask))
    for row, m in enumerate((N - 6, 9)):
        assert relative_error(got[[row], :m], to_numpy(model(ids[[row], :m]))) < FLOAT32


@each_model
@pytest.mark.parametrize("mixer", MIXERS.names())
def test_a_model_is_causal_exactly_when_it_says_so(kind, mixer):
    options = {"heads": 2, "chunk_size": C, "key_dim": 16, "mixers": list(TWO)}
    takes = inspect.signature(MIXERS.get(mixer)).parameters
    mixed = {"type": mixer, **{k: v for k, v in options.items() if k in takes}}
    refused = {
        "causal_only": (False, r"^\w+ is causal by definition: it needs causal true, got False$"),
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


@each_model
def test_learned_positions_refuse_a_longer_sequence(kind):
    model = model_of(kind, position_embedding="learned", max_length=N)
    assert model(token_ids(B, N)).shape == (B, N, V)
    with pytest.raises(ValueError, match=f"learned positions for max_length={N} tokens, got {N + 1}"):
        model(token_ids(B, N + 1))


@each_model
@pytest.mark.parametrize(("wrong", "message"), [
    ({"position_embedding": "learned"}, "'learned' needs max_length.* got max_length None with 'learned'"),
    ({"max_length": 9}, "no other takes it.* got max_length 9 with 'scaled_sin'"),
    ({"position_embedding": "rotary"}, "position_embedding must be 'scaled_sin', 'learned' or null, got 'rotary'"),
    ({"depth": 0}, "needs depth >= 1, got 0"),
    ({"vocabulary_size": 0}, "needs vocabulary_size >= 1, got 0"),
    ({"norm": "batch_norm"}, "norm must be one of scale_norm, layer_norm, .*, simple_rms_norm, got 'batch_norm'"),
    ({"dropout": 1.0}, "needs 0 <= dropout < 1, got 1.0"),
    ({"widht": 3}, "has no option 'widht'; did you mean 'width'?"),
    ({"mixer": {"type": "mixed_chunks"}}, "no mixer is called 'mixed_chunks'; did you mean 'mixed_chunk'?"),
    ({"mixer": {**MIXER, "chunksize": 3}}, "mixer 'mixed_chunk' has no option 'chunksize'; did you mean 'chunk_size'?"),
    ({"mixer": {**MIXER, "key_dim": True}}, "key_dim must be int, got True"),
    ({"feedforward": {"type": "glue"}}, "no feedforward is called 'glue'; did you mean 'glu'?"),
])  # fmt: skip
def test_a_wrong_option_is_named_with_what_was_needed(kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        MODELS.build({"type": kind, **SMALL, **wrong})


@each_model
def test_dropout_acts_in_training_alone(kind):
    model, ids = model_of(kind, dropout=0.5), token_ids(B, N)
    still = to_numpy(model(ids))
    assert np.array_equal(to_numpy(model(ids)), still)
    assert relative_error(to_numpy(model(ids, training=True)), still) > FLOAT32
    assert ops.shape(model(ids, training=True)) == (B, N, V)


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, texts):
        return [np.array([ord(c) - 96 for c in text], "int32") for text in texts]


@each_model
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
