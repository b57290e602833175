"""What every model must satisfy, on every backend. A new file in flash_tf/models is tested here."""

import importlib
import inspect
import pkgutil

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf import models
from flash_tf.models import MODELS
from flash_tf.models.classifier import Classifier
from flash_tf.models.matcher import Matcher
from flash_tf.models.regressor import Regressor
from flash_tf.models.span import SpanExtractor
from tests import tiers
from tests.backends import to_numpy
from tests.numerics import BFLOAT16_LAYER, FLOAT32, relative_error

B, N, V, D, C = 2, 37, 50, 32, 8
MIXER = {"type": "flash", "chunk_size": C, "key_dim": 16}
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
    "tie_embeddings": False,
    "norm_epsilon": 1e-3,
    "head_norm_epsilon": 1e-4,
    "post_norm": True,
    "norm_implementation": "xla",
    "token_types": 2,
}


def every_model():
    """Name -> class: those that a YAML may choose, and every other that a file of the folder defines."""
    names = [f"{models.__name__}.{file.name}" for file in pkgutil.iter_modules(models.__path__)]
    found = [one for name in names for one in vars(importlib.import_module(name)).values() if isinstance(one, type)]
    found = {cls for cls in found if cls.__module__ in names and issubclass(cls, keras.Model)}
    found = {cls for cls in found if cls.call is not keras.Model.call}  # LanguageModel has none
    chosen = {MODELS.get(name): name for name in MODELS.names()}
    return {chosen.get(cls, cls.__name__): cls for cls in sorted(found, key=lambda cls: cls.__name__)}


EVERY = every_model()
each_model = pytest.mark.parametrize("kind", EVERY)
some_models = pytest.mark.parametrize("kind", tiers.thinned(list(EVERY), "causal_lm", "classifier", "span"))
POSITIONS = [{}, {"position_embedding": "learned", "max_length": 5 * C}, {"position_embedding": None}]
each_position = pytest.mark.parametrize("positions", POSITIONS, ids=str)


def needed(kind):
    """What a model takes beside SMALL, none at its default, except `no_answer`, without which there is no threshold."""
    if issubclass(EVERY[kind], SpanExtractor):
        return {"no_answer": True, "no_answer_threshold": -0.5}
    options = {"classes": V, "hidden": 12, "position_embedding": "scaled_sin"}
    return {k: v for k, v in options.items() if k in signature(kind)} if issubclass(EVERY[kind], Classifier) else {}


def signature(kind):
    """The options of a constructor."""
    return {name: p for name, p in inspect.signature(EVERY[kind]).parameters.items() if name != "kwargs"}


def changed(kind):
    return {name: value for name, value in CHANGED.items() if name in signature(kind)}


def model_of(kind, **options):
    """A small model with the same weights every time."""
    model = EVERY[kind](**{**SMALL, **needed(kind), **options})
    model.build()
    rng = np.random.default_rng(6)
    for weight in model.trainable_variables:
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * rng.normal(size=weight.shape))
    return model


def token_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape).astype("int32")


def rows_of(kind, n=N):
    """What the model reads: B rows of n tokens, of a matcher each twice as many."""
    return token_ids(*((B, 2, n) if issubclass(EVERY[kind], Matcher) else (B, n)))


def real(ids, *lengths):
    """The padding mask of rows with `lengths` real tokens."""
    return np.broadcast_to(np.arange(ids.shape[-1]) < np.reshape(lengths, (B, *[1] * (ids.ndim - 1))), ids.shape)


def logits_of(kind, b=B, n=N):
    """The shape of what the model puts out."""
    if issubclass(EVERY[kind], Regressor):
        return (b, 1)
    if issubclass(EVERY[kind], SpanExtractor):
        return (b, n, 2)
    return (b, V) if issubclass(EVERY[kind], Classifier) else (b, n, V)


def other_norm(kind):
    return "layer_norm" if signature(kind)["norm"].default == "scale_norm" else "scale_norm"


@tiers.full_on_jax
@each_model
def test_every_option_is_in_the_config_and_survives_a_round_trip(kind):
    options = {**SMALL, **needed(kind), **changed(kind), "norm": other_norm(kind)}
    parameters = {name: p.default for name, p in signature(kind).items()}
    assert options.keys() == parameters.keys()
    same = [name for name, default in parameters.items() if options[name] == default]
    excepted = {
        Classifier: ["position_embedding"],
        SpanExtractor: ["no_answer"],
    }  # the first is learned, with max_length
    assert same == [name for cls, names in excepted.items() if issubclass(EVERY[kind], cls) for name in names]
    model = model_of(kind, **options)
    config = model.get_config()
    assert {name: config[name] for name in options} == options
    again = type(model).from_config(config)
    again.build()
    again.set_weights(model.get_weights())
    assert again.get_config() == config
    assert np.array_equal(to_numpy(again(rows_of(kind))), to_numpy(model(rows_of(kind))))


@some_models
@pytest.mark.parametrize(
    "all_changed", [pytest.param(False, id="plain", marks=pytest.mark.full), pytest.param(True, id="changed")]
)
@tiers.full_on_jax
def test_a_saved_model_comes_back_as_another_object_with_equal_outputs(kind, all_changed, tmp_path):
    model, ids = model_of(kind, **(changed(kind) if all_changed else {})), rows_of(kind)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again is not model and type(again) is type(model)
    assert {v.path for v in again.trainable_variables} == {v.path for v in model.trainable_variables}
    assert np.array_equal(to_numpy(again(ids)), to_numpy(model(ids)))


@tiers.full_on_jax
@each_model
def test_a_model_is_a_part_of_another_model_of_unknown_length(kind):
    model, ids = model_of(kind), rows_of(kind)
    tokens = keras.Input((*ids.shape[1:-1], None), dtype="int32")
    whole = keras.Model(tokens, model(tokens))
    assert whole.output_shape == logits_of(kind, None, None)
    assert relative_error(to_numpy(whole(ids)), to_numpy(model(ids))) < FLOAT32


@tiers.full_on_jax
@some_models
def test_a_dictionary_of_arguments_equals_the_arguments(kind):
    model, ids = model_of(kind), rows_of(kind)
    arguments = {"padding_mask": real(ids, N, 20), "positions": np.arange(N)[None] + 3}
    want = to_numpy(model(ids, **arguments))
    assert want.shape == logits_of(kind)
    assert np.array_equal(to_numpy(model({"token_ids": ids, **arguments})), want)
    assert relative_error(want, to_numpy(model(ids))) > FLOAT32


@pytest.mark.one_backend
@some_models
def test_a_dictionary_without_tokens_or_with_another_argument_is_one_clear_error(kind):
    model, ids = model_of(kind), rows_of(kind)
    for wrong, got in (({"tokens": ids}, "'tokens'"), ({"token_ids": ids, "attention_mask": ids}, "'attention_mask'")):
        needed = f"a dictionary of inputs needs token_ids, and may have padding_mask, .*got .*{got}"
        with pytest.raises(ValueError, match=needed):
            model(wrong)


@tiers.full_on_jax
@some_models
def test_mixed_bfloat16_keeps_float32_weights_and_close_logits(kind):
    model, ids = model_of(kind), rows_of(kind)
    mixed = model_of(kind, dtype="mixed_bfloat16")
    assert {v.dtype for v in mixed.trainable_variables} == {"float32"}
    logits = mixed(ids)
    assert keras.backend.standardize_dtype(logits.dtype) == "bfloat16"
    assert relative_error(to_numpy(logits), to_numpy(model(ids))) < 2 * BFLOAT16_LAYER  # two layers


@pytest.mark.full
@each_model
def test_recomputing_changes_neither_logits_nor_gradients(kind):
    ids, found = rows_of(kind), []
    labels = token_ids(*logits_of(kind)[:-1], seed=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if issubclass(EVERY[kind], Regressor | SpanExtractor):
        labels, loss = labels[..., None].astype("float32"), keras.losses.MeanSquaredError()
    for remat in (False, True, 1):
        model = model_of(kind, depth=2, remat=remat, dtype="float64")  # the sum in a scalar's gradient may cancel
        before = model.get_weights()
        out = to_numpy(model(ids, training=True))
        model.compile(keras.optimizers.SGD(1e4), loss)
        model.train_on_batch({"token_ids": ids}, labels)
        found.append((out, [new - old for new, old in zip(model.get_weights(), before, strict=True)]))
    (out, deltas), *others = found
    for again, recomputed in others:
        assert relative_error(again, out) < FLOAT32
        for delta, other in zip(deltas, recomputed, strict=True):
            assert np.any(delta) and relative_error(other, delta) < FLOAT32


def test_blocks_are_computed_again_from_the_first_on():
    models = [model_of("causal_lm", depth=4, remat=remat) for remat in (False, 0, 1, 3, 4, True)]
    per_block = len(models[0].blocks) // 4
    for model, count in zip(models, (0, 0, 1, 3, 4, 4), strict=True):
        assert [block.remat for block in model.blocks] == [i < count * per_block for i in range(4 * per_block)]
    none, _, one, three, *_ = (model.activation_bytes(N, N, 2) for model in models)
    assert none > one > three


def padded_cases():
    """Every kind of positions with every model; the default tier takes all kinds with one model."""
    plain = lambda kind, positions: not positions or kind == "causal_lm"  # noqa: E731
    return [
        pytest.param(kind, at, id=f"{at}-{kind}", marks=[] if plain(kind, at) else [pytest.mark.full])
        for at in POSITIONS
        for kind in EVERY
    ]


@tiers.full_on_jax
@pytest.mark.parametrize(("kind", "positions"), padded_cases())
def test_padding_on_the_right_equals_a_shorter_text(kind, positions):
    model, ids = model_of(kind, **positions), rows_of(kind)
    mask = real(ids, N - 6, 9)
    got = to_numpy(model(ids, padding_mask=mask))
    for row, m in enumerate((N - 6, 9)):
        want = to_numpy(model(ids[[row], ..., :m]))
        assert relative_error(got[[row]] if got.ndim == 2 else got[[row], :m], want) < FLOAT32


@tiers.full_on_jax
@each_model
def test_learned_positions_refuse_a_longer_sequence(kind):
    model = model_of(kind, position_embedding="learned", max_length=N)
    assert model(rows_of(kind)).shape == logits_of(kind)
    with pytest.raises(ValueError, match=f"learned positions for max_length={N} tokens, got {N + 1}"):
        model(rows_of(kind, N + 1))


@some_models
def test_dropout_acts_in_training_alone(kind):
    model, ids = model_of(kind, dropout=0.5), rows_of(kind)
    still = to_numpy(model(ids))
    assert np.array_equal(to_numpy(model(ids)), still)
    assert relative_error(to_numpy(model(ids, training=True)), still) > FLOAT32
    assert ops.shape(model(ids, training=True)) == logits_of(kind)
