"""Subclasses of layers and models by a user, and parts of a model in a Keras model of the user's own."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import GLU, LRPE, MixedChunkAttention, OffsetScale, RandomFeatures, RotaryEmbedding, T5Bias
from flash_tf.models import CausalLM, MaskedLM, Matcher
from tests.backends import to_numpy

V, D, N = 50, 16, 9
IDS = np.random.default_rng(0).integers(1, V, (2, N)).astype("int32")
MIXER = {"type": "flash", "chunk_size": 4, "key_dim": 8}
STACK = {"vocabulary_size": V, "width": D, "depth": 1, "mixer": MIXER}
registered = keras.saving.register_keras_serializable("tests")


@registered
class WithOption(MixedChunkAttention):
    """It adds an option, and hands the others on."""

    def __init__(self, gain: float = 1.0, **others):
        super().__init__(**others)
        self.gain = gain

    def call(self, x, **arguments):
        return self.gain * super().call(x, **arguments)


@registered
class WithFixedOption(MixedChunkAttention):
    """It sets an option itself."""

    def __init__(self, **kwargs):
        super().__init__(causal=True, **kwargs)


@registered
class WithPlaces(MixedChunkAttention):
    """It hands all on, also by their places."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


@registered
class Warm(CausalLM):
    """A model with an option of its own."""

    def __init__(self, temperature: float = 1.0, **kwargs):
        super().__init__(**kwargs)
        self.temperature = temperature

    def call(self, token_ids, **arguments):
        return super().call(token_ids, **arguments) / self.temperature


class WithTypes(GLU):
    """Its options have types that nobody can look up or check."""

    def __init__(self, thing: "KnownElsewhere" = None, limit: float = 0.0, **kwargs):  # noqa: F821
        super().__init__(**kwargs)
        self.thing, self.limit = thing, limit


def functional(*layers):
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(V, D)(ids)
    for layer in layers:
        x = layer(x)
    return keras.Model(ids, x)


def saved(model, path):
    model.save(path)
    return keras.saving.load_model(path)


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: WithOption(2.0, chunk_size=4, causal=True), {"gain": 2.0, "chunk_size": 4, "causal": True}),
        (lambda: WithFixedOption(chunk_size=4, key_dim=8), {"chunk_size": 4, "key_dim": 8, "causal": True}),
        (lambda: WithPlaces(4, True, key_dim=8), {"chunk_size": 4, "causal": True, "key_dim": 8}),
    ],
    ids=["an option", "a fixed option", "places"],
)
def test_a_subclass_of_a_layer_has_the_options_that_it_hands_on_in_files(make, kept, tmp_path):
    model = functional(make())
    again = saved(model, tmp_path / "m.keras")
    assert {name: getattr(again.layers[-1], name) for name in kept} == kept
    assert np.array_equal(to_numpy(again(IDS)), to_numpy(model(IDS)))


def test_a_subclass_of_a_model_has_the_options_that_it_hands_on_in_files(tmp_path):
    model = Warm(temperature=2.0, **STACK)
    before = to_numpy(model(IDS))
    again = saved(model, tmp_path / "m.keras")
    assert again.temperature == 2.0 and np.array_equal(to_numpy(again(IDS)), before)


def test_options_of_a_subclass_are_its_own_affair_and_those_of_the_package_are_checked():
    layer = WithTypes(thing=3, limit=float("inf"))
    assert layer(np.ones((1, 2, D), "float32")).shape == (1, 2, D) and layer.thing == 3
    with pytest.raises(ValueError, match="WithOption: chunk_size must be int, got '4'"):
        WithOption(chunk_size="4")


def test_an_edited_config_leaves_the_layer_as_it_is_and_has_pythons_own_numbers():
    model = CausalLM(**STACK)
    config = model.get_config()
    config["mixer"]["chunk_size"] = 2
    assert model.get_config()["mixer"] == MIXER
    assert '"key_dim": 8' in json.dumps(MixedChunkAttention(key_dim=np.int32(8)).get_config())
    assert MixedChunkAttention(key_dim=np.int32(8))(np.ones((1, 2, D), "float32")).shape == (1, 2, D)


class Tagger(keras.Model):
    """A user's model around `encode`, with layers of its own after it."""

    def __init__(self):
        super().__init__()
        self.language_model = MaskedLM(**STACK, dropout=0.5)
        self.language_model.build()
        self.drop = keras.layers.Dropout(0.5)

    def call(self, ids):
        return self.drop(ops.ones((1, 100))), self.language_model.encode(ids), self.drop(ops.ones((1, 100)))


def test_encode_in_a_call_of_a_users_model_trains_and_lets_the_layers_after_it_train():
    model = Tagger()
    first, second = ([to_numpy(x) for x in model(IDS, training=True)] for _ in range(2))
    assert all(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    before, *_, after = (to_numpy(x) for x in model(IDS, training=False))
    assert np.all(before == 1) and np.all(after == 1)


def test_encode_builds_the_model():
    model = CausalLM(**STACK)
    x = model.encode(IDS)
    assert np.allclose(to_numpy(model.head(x)), to_numpy(model(IDS)), atol=1e-6)


def test_token_types_that_the_model_does_not_read_are_refused():
    with pytest.raises(ValueError, match="reads token_type_ids only with the option token_types"):
        MaskedLM(**STACK).encode(IDS, token_type_ids=IDS)


def test_an_embedding_and_a_backbone_used_twice_load_from_a_users_model(tmp_path):
    model, one, other = CausalLM(**STACK), *(keras.Input((None,), dtype="int32") for _ in range(2))
    embedded = keras.Model(one, keras.layers.Dense(3)(model.embedding(one)))
    both = keras.Model([one, other], keras.layers.Add()([model.backbone(one), model.backbone(other)]))
    assert model.backbone is model.backbone
    for name, mine, given in (("embedding", embedded, IDS), ("both", both, [IDS, IDS])):
        again = saved(mine, tmp_path / f"{name}.keras")
        assert np.array_equal(to_numpy(again(given)), to_numpy(mine(given)))


def test_every_head_has_the_mask_of_what_it_is_made_of():
    x = keras.layers.Embedding(V, D, mask_zero=True)(np.array([[1, 0]]))
    heads = OffsetScale(["q", "k"])(x)
    assert all(to_numpy(keras.src.backend.get_keras_mask(head)).tolist() == [[True, False]] for head in heads.values())


@pytest.mark.parametrize("cls", [LRPE, RandomFeatures, RotaryEmbedding])
def test_a_layer_of_heads_refuses_a_tensor_without_their_axis(cls):
    with pytest.raises(ValueError, match="expected ndim=4, found ndim=3"):
        cls()(np.ones((1, 3, 4), "float32"))


def test_a_bias_refuses_more_positions_than_its_window():
    with pytest.raises(ValueError, match="T5Bias has a window of 8 positions, got n = 12"):
        T5Bias(window=8)(n=12)


def test_both_texts_of_a_pair_have_types():
    model = Matcher(2, **STACK, max_length=N, token_types=2)
    pairs, types = np.stack([IDS, IDS[::-1]], axis=1), np.zeros((2, 2, N), "int32")
    plain = to_numpy(model({"token_ids": pairs}))
    assert np.array_equal(to_numpy(model({"token_ids": pairs, "token_type_ids": types})), plain)
    assert not np.allclose(to_numpy(model({"token_ids": pairs, "token_type_ids": types + 1})), plain)
