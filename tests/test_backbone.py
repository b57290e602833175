"""A language model without its head as a layer of a user's model: it trains, freezes and saves with it."""

import keras
import numpy as np
import pytest

from flash_tf.models import CausalLM, Classifier, MaskedLM
from tests import tiers
from tests.backends import to_numpy
from tests.numerics import FLOAT32, relative_error

V, N = 50, 12
STACK = {"vocabulary_size": V, "width": 16, "depth": 1, "mixer": {"type": "flash", "chunk_size": 4, "key_dim": 8}}
SOURCES = {
    "masked_lm": lambda: MaskedLM(**STACK, dropout=0.1),
    "causal_lm": lambda: CausalLM(**STACK, head_projection=True),
    "classifier": lambda: Classifier(2, max_length=N, **STACK),
}
IDS = np.random.default_rng(0).integers(1, V, (8, N)).astype("int32")


def around(source):
    source.build()
    ids = keras.Input((N,), dtype="int32")
    backbone = source.backbone
    x = keras.layers.GlobalAveragePooling1D()(backbone(ids))
    return backbone, keras.Model(ids, keras.layers.Dense(2)(x))


def weights(model):
    return [to_numpy(weight.value) for weight in model.trainable_variables]


@pytest.mark.parametrize("kind", tiers.thinned(SOURCES, "masked_lm"))
def test_a_model_around_a_backbone_trains_it_and_comes_back_from_a_file(kind, tmp_path):
    source = SOURCES[kind]()
    backbone, model = around(source)
    assert relative_error(to_numpy(backbone(IDS)), to_numpy(source.encode(IDS))) < FLOAT32
    before = weights(backbone)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(IDS, IDS[:, 0] % 2, batch_size=4, verbose=0)
    changed = [not np.array_equal(a, b) for a, b in zip(before, weights(backbone), strict=True)]
    assert sum(changed) > len(changed) / 2
    assert any(weight is source.embedding.embeddings for weight in model.trainable_variables)
    model.save(tmp_path / "mine.keras")
    again = keras.saving.load_model(tmp_path / "mine.keras")
    assert relative_error(to_numpy(again(IDS)), to_numpy(model(IDS))) < FLOAT32


@pytest.mark.parametrize("from_file", tiers.thinned([False, True], True))
def test_a_frozen_backbone_keeps_its_weights(from_file, tmp_path):
    backbone, model = around(SOURCES["masked_lm"]())
    backbone.trainable = False
    if from_file:
        model.save(tmp_path / "mine.keras")
        model = keras.saving.load_model(tmp_path / "mine.keras")
        (backbone,) = (layer for layer in model.layers if isinstance(layer, type(backbone)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert len(model.trainable_variables) == 2
    before = to_numpy(backbone(IDS))
    model.fit(IDS, IDS[:, 0] % 2, verbose=0)
    assert np.array_equal(to_numpy(backbone(IDS)), before)


def test_padding_is_what_a_mask_says():
    source = SOURCES["masked_lm"]()
    backbone, _ = around(source)
    real = np.tile(np.arange(N) < 7, (8, 1))
    found = [to_numpy(backbone(np.where(real, IDS, other), padding_mask=real))[:, :7] for other in (0, 9)]
    assert relative_error(found[0], found[1]) < FLOAT32
    assert relative_error(found[0], to_numpy(source.encode(IDS, padding_mask=real))[:, :7]) < FLOAT32
    assert relative_error(found[0], to_numpy(backbone(IDS[:, :7]))) < FLOAT32


def test_backbones_of_several_models_stand_in_one():
    ids, sources = keras.Input((N,), dtype="int32"), [SOURCES["masked_lm"]() for _ in range(2)]
    model = keras.Model(ids, keras.layers.Concatenate()([source.backbone(ids) for source in [*sources, sources[0]]]))
    want = [to_numpy(source.encode(IDS)) for source in [*sources, sources[0]]]
    assert relative_error(to_numpy(model(IDS)), np.concatenate(want, axis=-1)) < FLOAT32


def test_ids_that_come_as_floats_are_not_rounded_in_reduced_precision():
    ids = np.array([[301, 303, 999, 257]])
    source = MaskedLM(1000, width=16, depth=1, mixer=STACK["mixer"], dtype="mixed_bfloat16")
    floats = keras.Input((None,))  # Keras' own dtype
    model = keras.Model(floats, source.backbone(floats))
    assert np.array_equal(to_numpy(model(ids.astype("float32"))), to_numpy(source.encode(ids)))


@pytest.mark.parametrize("kind", ["masked_lm", "classifier"])
def test_a_model_and_its_backbone_are_spread_over_time(kind):
    source = SOURCES[kind]()
    texts = keras.Input((2, N), dtype="int32")
    for layer in (source, source.backbone):
        model = keras.Model(texts, keras.layers.TimeDistributed(layer)(texts))
        found, alone = to_numpy(model(np.stack([IDS, IDS[::-1]], 1))), to_numpy(layer(IDS))
        assert relative_error(found[:, 0], alone) < FLOAT32 and relative_error(found[:, 1], alone[::-1]) < FLOAT32
