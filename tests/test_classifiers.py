"""Models that put texts into classes, trained as their users do: with `fit`."""

import keras
import numpy as np
import pytest

from flash_tf import config
from flash_tf.models.causal_lm import CausalLM
from flash_tf.models.classifier import Classifier
from flash_tf.models.masked_lm import MaskedLM
from flash_tf.models.matcher import Matcher
from flash_tf.models.regressor import Regressor
from flash_tf.training import modelling
from tests.backends import to_numpy
from tests.numerics import FLOAT32, relative_error

B, N, V, D = 3, 21, 40, 16
MIXER = {"type": "flash", "chunk_size": 8, "key_dim": 8}
SMALL = {"vocabulary_size": V, "width": D, "depth": 1, "mixer": MIXER, "max_length": N, "hidden": 12}
STACK = {name: value for name, value in SMALL.items() if name != "hidden"} | {"position_embedding": "learned"}
ATTENTION = ["self_attention", "linear_attention"]
each = pytest.mark.parametrize(("cls", "shape"), [(Classifier, (B, N)), (Matcher, (B, 2, N))])


def model_of(cls, stack=None, **options):
    model = cls(3, **{**SMALL, **options}) if stack is None else cls(**{**stack, **options})
    model.build()
    rng = np.random.default_rng(6)
    for weight in model.trainable_variables:
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * rng.normal(size=weight.shape))
    return model


def token_ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(1, V, shape).astype("int32")


def network(model, x):
    """The two layers in NumPy."""
    inner, outer = ({w.name: to_numpy(w.value) for w in layer.weights} for layer in (model.inner, model.outer))
    return np.maximum(x @ inner["kernel"] + inner["bias"], 0) @ outer["kernel"] + outer["bias"]


def test_a_classifier_is_its_network_over_the_mean_of_the_tokens():
    model, ids = model_of(Classifier), token_ids(B, N)
    assert relative_error(to_numpy(model(ids)), network(model, to_numpy(model.encode(ids)).mean(axis=1))) < FLOAT32


def test_a_matcher_is_its_network_over_both_means_their_product_and_their_difference():
    model, ids = model_of(Matcher), token_ids(B, 2, N)
    x, y = (to_numpy(model.encode(ids[:, i])).mean(axis=1) for i in (0, 1))
    want = network(model, np.concatenate([x, y, x * y, x - y], axis=-1))
    assert relative_error(to_numpy(model(ids)), want) < FLOAT32


@pytest.mark.parametrize(
    ("cls", "shape"), [pytest.param(Classifier, (B, N), marks=pytest.mark.full), (Matcher, (B, 2, N))]
)
def test_fit_learns_which_tokens_a_class_has(cls, shape):
    keras.utils.set_random_seed(0)  # `fit` shuffles by TensorFlow's own seed
    rng, rows = np.random.default_rng(0), 256
    labels = rng.integers(0, 2, rows)
    firsts = labels.reshape(-1, *[1] * (len(shape) - 1))  # a matcher's first text says it, the other is noise
    ids = rng.integers(1, 5, (rows, *shape[1:]))
    ids = ids + 3 * firsts if len(shape) == 2 else np.stack([ids[:, 0] + 3 * firsts[:, 0], ids[:, 1]], axis=1)
    model = cls(2, **{**SMALL, "vocabulary_size": 8})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    history = model.fit({"token_ids": ids.astype("int32")}, labels, batch_size=32, epochs=12, verbose=0).history
    assert history["accuracy"][-1] > 0.95, history["accuracy"]


@each
def test_wrong_options_are_named(cls, shape):
    with pytest.raises(ValueError, match=f"{cls.__name__} needs classes >= 2 and hidden >= 1, got 1 and 12"):
        cls(1, **SMALL)
    with pytest.raises(ValueError, match=f"{cls.__name__} has no head over tokens: it takes no head_bias"):
        cls(2, head_bias=True, **SMALL)
    with pytest.raises(ValueError, match="position_embedding 'learned' needs max_length"):
        cls(2, **{k: v for k, v in SMALL.items() if k != "max_length"})


def test_a_matcher_needs_two_texts_a_row():
    with pytest.raises(ValueError, match=r"needs two texts a row, token_ids \[b, 2, n\], got shape \(3, 21\)"):
        model_of(Matcher)(token_ids(B, N))


@each
def test_a_config_chooses_it_and_a_wrong_option_is_named(cls, shape):
    kind = cls.__name__.lower()
    options = ["model.classes=3", "model.position_embedding=learned", "model.hidden=5"]
    model = modelling.make_model(modelling.with_masking(config.load("quickstart", [f"model.type={kind}", *options])))
    assert (type(model), model.classes, model.hidden, model.max_length) == (cls, 3, 5, 128)
    for option, said in {"head_bias=true": "has no option 'head_bias'", "widht=3": "did you mean 'width'"}.items():
        wrong = config.load("quickstart", [f"model.type={kind}", *options, f"model.{option}"])
        with pytest.raises(ValueError, match=f"model '{kind}' {said}|{said}"):
            modelling.with_masking(wrong)


@each
def test_a_classifier_starts_from_the_stack_of_a_language_model_and_keeps_its_new_head(cls, shape):
    source = model_of(MaskedLM, STACK)
    model = cls(3, **SMALL)
    model.build()
    inner, outer = (to_numpy(layer.kernel.value) for layer in (model.inner, model.outer))
    done = model.init_from(source)
    assert sorted(done.fresh) == ["inner/bias", "inner/kernel", "outer/bias", "outer/kernel"]
    assert done.left == ["output_bias"] and len(done.loaded) == len(source.weights) - 1
    assert (
        str(done) == f"{len(done.loaded)} weights loaded; not loaded: {', '.join(done.fresh)}; left behind: output_bias"
    )
    assert (to_numpy(model.inner.kernel.value) == inner).all() and (to_numpy(model.outer.kernel.value) == outer).all()
    ids = token_ids(B, N)
    assert (to_numpy(model.encode(ids)) == to_numpy(source.encode(ids))).all()


def test_a_start_from_mixers_of_another_function_is_said():
    source, mixer = model_of(MaskedLM, STACK), {**MIXER, "scale": "paper_appendix"}
    same = {"implementation": "xla", "bias_start": "symmetric"}  # which leave the function as it is
    model = model_of(Classifier, mixer={**mixer, **same})
    said = "; the models differ in scale (normalized there, paper_appendix here)"
    assert str(model.init_from(source)).endswith(said)
    assert "differ" not in str(model_of(Classifier).init_from(source))


@pytest.mark.one_backend
def test_a_model_starts_from_a_model_of_the_package_alone():
    for source in ("runs/lm", keras.layers.Dense(3)):
        with pytest.raises(ValueError, match=f"starts from another model of ft.models, got {type(source).__name__}"):
            model_of(Classifier).init_from(source)


def test_a_start_from_a_model_of_another_function_is_said():
    feedforward = {"feedforward": {"type": "glu"}, "mixer": {"type": "parallel", "mixers": [MIXER, {"type": "gau"}]}}
    source, other = model_of(MaskedLM, STACK, **feedforward), {"type": "glu", "activation": "silu"}
    said = str(model_of(Classifier, **feedforward, post_norm=True).init_from(source))
    assert said.endswith("; the models differ in post_norm (False there, True here)")
    mixers = [MIXER, {"type": "gau", "scale": "paper_appendix", "bias_start": "symmetric"}]
    model = model_of(Classifier, feedforward=other, mixer={"type": "parallel", "mixers": mixers})
    differ = "scale (normalized there, paper_appendix here), activation (gelu there, silu here)"
    assert str(model.init_from(source)).endswith(f"; the models differ in {differ}")


def test_a_model_of_another_mixer_takes_what_fits_and_says_what_does_not():
    options = {name: SMALL[name] for name in ("vocabulary_size", "width")} | {"depth": 2}
    softmax, linear = ({"mixer": {"type": name, "heads": 2}, "feedforward": {"type": "glu"}} for name in ATTENTION)
    source = model_of(CausalLM, options, **softmax)
    model = model_of(CausalLM, options, **linear, position_embedding="learned", max_length=N)
    done = model.init_from(source)
    assert (done.fresh, done.left) == (["positions/embeddings"], ["positions/a"])
    theirs, ours = ({v.path.partition("/")[2]: to_numpy(v.value) for v in one.weights} for one in (source, model))
    assert all((ours[name] == theirs[name]).all() for name in done.loaded) and len(done.loaded) == len(theirs) - 1

    done = model_of(CausalLM, options, mixer=MIXER).init_from(source)
    assert sorted({name.partition("/")[0] for name in done.loaded}) == [
        "embedding",
        "final_norm",
        "mixer_0",
        "mixer_1",
        "output_bias",
        "positions",
    ]
    left = "mixer_*/mixer/*, feedforward_*/feedforward/*, feedforward_*/norm/*"
    assert str(done).endswith(f" weights loaded; not loaded: mixer_*/mixer/*; left behind: {left}")
    with pytest.raises(ValueError, match=r"shape \(40, 8\), got \(40, 16\); what fits: output_bias, pos"):
        model_of(CausalLM, options, mixer=MIXER, width=8).init_from(source)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 8}, r".* needs shape \(40, 16\), got \(40, 8\), and \d+ more weights do not fit; what fits: \S+, "),
        ({"depth": 2}, r"it has no place for mixer_1/\S+ and \d+ more"),
        ({"position_embedding": None, "max_length": None}, r"it needs positions/embeddings, which is not there"),
    ],
)
def test_a_classifier_does_not_start_from_another_stack_and_stays_as_it_was(options, said):
    stack = {name: SMALL[name] for name in ("vocabulary_size", "width", "depth", "mixer", "max_length")}
    model, source = (
        model_of(Classifier),
        model_of(MaskedLM, stack={"position_embedding": "learned", **stack}, **options),
    )
    before = [to_numpy(v.value) for v in model.weights]
    with pytest.raises(ValueError, match=f"a Classifier cannot start from this MaskedLM: {said}"):
        model.init_from(source)
    assert all((to_numpy(v.value) == x).all() for v, x in zip(model.weights, before, strict=True))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Classifier, {"classes": 2}),
        pytest.param(Matcher, {"classes": 2}, marks=pytest.mark.full),
        pytest.param(Regressor, {}, marks=pytest.mark.full),
    ],
)
def test_a_task_comes_from_the_preset_of_a_language_model_or_from_its_own(tmp_path, cls, options):
    source = model_of(MaskedLM, STACK, head_projection=True)
    source.save_to_preset(tmp_path / "mlm")
    model = cls.from_preset(tmp_path / "mlm", hidden=5, **options)
    ids = token_ids(B, N)
    assert type(model) is cls and model.hidden == 5
    assert (to_numpy(model.encode(ids)) == to_numpy(source.encode(ids))).all()
    model.save_to_preset(tmp_path / "own")
    again = cls.from_preset(tmp_path / "own")
    assert (to_numpy(again.outer.kernel.value) == to_numpy(model.outer.kernel.value)).all()
    with pytest.raises(ValueError, match=f"has a {cls.__name__}, not a MaskedLM"):
        MaskedLM.from_preset(tmp_path / "own")


def test_a_task_comes_from_the_preset_of_another_head(tmp_path):
    model_of(Matcher, STACK, classes=2).save_to_preset(tmp_path / "two")
    source, ids = Matcher.from_preset(tmp_path / "two"), token_ids(B, N)
    same = Matcher.from_preset(tmp_path / "two", classes=2, dropout=0.1)
    assert (to_numpy(same.outer.kernel.value) == to_numpy(source.outer.kernel.value)).all()
    for cls in (Matcher, Classifier):
        model = cls.from_preset(tmp_path / "two", classes=3)
        assert type(model) is cls and model.outer.kernel.shape[1] == 3
        assert (to_numpy(model.encode(ids)) == to_numpy(source.encode(ids))).all()
    assert type(Classifier.from_preset(tmp_path / "two", classes=2)) is Classifier
    with pytest.raises(ValueError, match=r"^Classifier.from_preset needs classes$"):
        Classifier.from_preset(tmp_path / "two")
    with pytest.raises(ValueError, match="has no option 'clases'; did you mean 'classes'"):
        Matcher.from_preset(tmp_path / "two", clases=3)
