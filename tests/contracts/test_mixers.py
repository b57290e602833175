"""What every mixer and feed-forward layer must satisfy, on every backend. A new file in their folders is found."""

import inspect
import re

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import ResidualBlock
from flash_tf.layers.feedforward import FEEDFORWARDS
from flash_tf.layers.mixers import MIXERS
from flash_tf.models import MODELS
from tests import backends, tiers
from tests.backends import compiled, on_jax_compiled, tensors, to_numpy, value_and_gradients
from tests.numerics import (
    ALIVE_GRADIENT,
    ALIVE_OUTPUT,
    BFLOAT16_LAYER,
    FAINT,
    FLOAT32,
    INT8,
    at,
    masks,
    real_tokens,
    relative_error,
)

B, N, D = 2, 37, 32  # N is prime: never a multiple of a chunk
SMALL = {"heads": 2, "chunk_size": 8, "key_dim": 16, "landmarks": 8, "queries": 8, "rank": 8}
SMALL |= {"buckets": 4, "random_blocks": 1, "block_size": 8}
TWO = ({"type": "diag_attention", "heads": 2, "chunk_size": 8}, {"type": "linear_attention", "heads": 2})
SMALL["mixers"] = list(TWO)
OTHER = {
    "kernel": ("softmax", "relu2", "softmax_plus"),
    "scale": ("paper_appendix",),
    "bias_start": ("symmetric",),
    "divisor": ("length", 5),
    "activation": ("silu",),
    "features": ("relu", "elu_plus_one", "softplus", "elu", "favor"),
    "normalizer": ("rms", "none"),
    "attention": ("relu",),
    "gates": ("value", "both", "none"),
    "kv_heads": (1,),
    "norm_epsilon": (0.1,),
    "rotary_dim": (8,),
    "rotary_heads": ("local", "none"),
    "summaries": ("fixed",),
    "form": ("cumsum", "matmul"),
    "parts": ("local", "global"),
    "implementation": ("xla",),
    "first_to_all": ("cls", "chunks"),
    "seed": (1,),
    "attention_dropout": (0.5,),
    "mixers": ([*TWO, {"type": "flash", "key_dim": 16, "chunk_size": 8}], [{"type": "gau"}, TWO[0]]),
    "cosine_length": (64,),  # not less than the longest text here
}
OF_THE_IMPLEMENTATION = ("form", "block_size", "implementation")  # options that change the speed alone
OF_TRAINING = ("attention_dropout",)
OF_THE_START = ("bias_start",)  # options that change the first weights alone
BESIDE = {  # what a value needs
    ("kernel", "softmax"): {"relative_bias": False},  # softmax takes no bias
    ("kernel", "softmax_plus"): {"relative_bias": False},
    ("features", "elu"): {"normalizer": "rms"},  # it may be negative
    ("random_features", 24): {"features": "favor"},  # only "favor" has them
    ("parts", "global"): {"relative_bias": False},  # across chunks there is none
    ("lrpe", True): {"normalizer": "rms"},  # so may what it turns
}


def defaults(cls, sizes=SMALL):
    """Every option of a layer that has more than one value, at a size for tests."""
    parameters = inspect.signature(cls).parameters.values()
    fixed = ("causal",) if causal_only(cls) or never_causal(cls) else ()
    kept = (p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in fixed)
    return {p.name: sizes.get(p.name, p.default) for p in kept}


def causal_only(cls):
    return getattr(cls, "causal_only", False)


def never_causal(cls):
    return getattr(cls, "never_causal", False)


def may_be_causal(options):
    """Whether the options of a layer that can be causal go with it."""
    return options.get("first_to_all", "none") == "none"  # it reads later tokens


def packs(mixer):
    return getattr(mixer, "packs", True) or mixer.causal


def is_causal(cls, options):
    return causal_only(cls) or options.get("causal", False)


def others(name, value):
    """Values of an option that are not its default; a new option in words needs a line in `OTHER`."""
    if name in OTHER:
        return [other for other in OTHER[name] if other != value]
    if isinstance(value, bool):
        return [not value]
    if not isinstance(value, int | float | None):
        raise ValueError(f"option {name} needs a line in OTHER of {__name__}, a value beside {value!r}; got none")
    return [24] if value is None else [2 * value]


def changes(cls):
    """One option of a layer and another value for it, with what that value needs beside it: `(name, options)` each."""
    base = defaults(cls)
    for name, value in base.items():
        for other in others(name, value):
            beside = next((options for case, options in BESIDE.items() if case == (name, other)), {})
            yield name, {**base, **{k: v for k, v in beside.items() if k in base}, name: other}


def cases(registry, changed=True):
    """Every layer of a registry with its defaults, and with each other value of each option, causal or not."""
    found = {}
    for kind in registry.names():
        cls = registry.get(kind)
        for options in (defaults(cls), *(options for _, options in changes(cls) if changed)):
            both = ({"causal": False}, {"causal": True})[: 1 + may_be_causal(options)]
            for causal in both if "causal" in options else ({},):
                case = {**options, **causal}
                said = [f"{k}={v}" for k, v in case.items() if v != defaults(cls)[k]]
                found["-".join([kind, *said])] = (cls, case)
    return [pytest.param(cls, case, id=name) for name, (cls, case) in found.items()]


def thinned(registry, changed=True):
    """`cases`. The default tier takes the layers at their defaults; without `changed`, each in one form."""
    plain = [case.id for case in cases(registry, changed=False)]
    kept = [id for id in plain if changed or f"{id}-causal=True" not in plain]
    full = lambda case: [] if case.id in kept else [pytest.mark.full]  # noqa: E731
    return [pytest.param(*case.values, id=case.id, marks=full(case)) for case in cases(registry, changed)]


arguments = ("cls", "options")
each_mixer = pytest.mark.parametrize(arguments, thinned(MIXERS))
each_feedforward = pytest.mark.parametrize(arguments, cases(FEEDFORWARDS))
each_causal_mixer = pytest.mark.parametrize(arguments, [case for case in thinned(MIXERS) if is_causal(*case.values)])
defaults_once = thinned(MIXERS, changed=False) + thinned(FEEDFORWARDS, changed=False)
each_default = pytest.mark.parametrize(arguments, defaults_once)
plain_layers = [pytest.param(registry.get(k), id=k) for registry in (MIXERS, FEEDFORWARDS) for k in registry.names()]
each_plain_layer = pytest.mark.parametrize("cls", plain_layers)
# One of each base class and of each way to make its weights; the others share their code.
TELLING = ("flash", "gau", "self_attention", "linear_attention", "mamba", "gla", "parallel", "nystromformer", "glu")
some_plain_layers = pytest.mark.parametrize("cls", tiers.of_kinds(plain_layers, *TELLING))
some_plain_mixers = pytest.mark.parametrize(
    "kind", tiers.thinned(MIXERS.names(), "flash", "self_attention", "linear_attention", "mamba")
)


def built(cls, options, dtype="float32"):
    """A layer with the same weights every time: noise, around 1 where a weight starts at 1."""
    backends.seed(0)
    layer = cls(dtype=dtype, **options)
    layer.build((B, N, D))
    rng = np.random.default_rng(6)
    for weight in layer.weights:
        weight.assign(np.round(to_numpy(weight.value)) + 0.2 * rng.normal(size=weight.shape))
    return layer


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def rms(x):
    return float(np.sqrt(np.mean(np.square(to_numpy(x)))))


def outputs(layer, x, **masked):
    return to_numpy(on_jax_compiled(layer.__call__)(tensors({"x": x}, "float32")["x"], **tensors(masked, "float32")))


@pytest.mark.one_backend
@pytest.mark.full
@each_plain_layer
def test_every_option_is_in_the_config_and_survives_a_round_trip(cls):
    changed = dict(changes(cls))
    assert changed.keys() == defaults(cls).keys()
    for name, options in changes(cls):
        layer = built(cls, options)
        config = layer.get_config()
        assert {k: config[k] for k in options} == options
        again = cls.from_config(config)
        assert again.get_config() == config
        again.build((B, N, D))
        again.set_weights(layer.get_weights())
        x = normal(B, N, D)
        assert np.array_equal(outputs(again, x), outputs(layer, x)), name


@pytest.mark.one_backend
@pytest.mark.parametrize("cls", tiers.of_kinds(plain_layers, "flash", "linear_attention", "glu"))
def test_every_option_of_the_function_and_no_other_changes_the_output(cls):
    x, found = normal(1, N, D), {}  # five chunks of 8: BigBird sees all of fewer

    def output(options):  # most options differ from the same ones
        if repr(options) not in found:
            found[repr(options)] = outputs(built(cls, options), x)
        return found[repr(options)]

    for name, options in changes(cls):
        # Causal where it can be: divisor "length" differs there alone.
        causal = {"causal": may_be_causal(options)} if "causal" in options else {}
        after, before = {**options, **causal}, {**options, **causal, name: defaults(cls)[name]}
        error = relative_error(output(after), output(before))
        same = name in (*OF_THE_IMPLEMENTATION, *OF_TRAINING, *OF_THE_START)
        assert error < FLOAT32 if same else error > FLOAT32, name


each_headed = pytest.mark.parametrize(
    "kind", [kind for kind in MIXERS.names() if defaults(MIXERS.get(kind), sizes={}).get("heads", 1) is None]
)


@pytest.mark.one_backend
@each_headed
def test_the_heads_of_a_layer_without_any_divide_every_even_width(kind):
    cls = MIXERS.get(kind)
    most = 4 if kind in ("gla", "retention") else 12
    for width in (2, 10, 16, 64, 128, 256, 512, 768, 1024):
        layer = cls()
        layer.set_heads((None, None, width), multiple=2)
        below = max(h for h in range(1, most + 1) if width % (2 * h) == 0)
        assert layer.heads == (most if width % (2 * most) == 0 else below), width
    layer = cls()
    layer.set_heads((None, None, 12))
    assert layer.heads == most  # as before the default was None
    layer = built(cls, {k: v for k, v in defaults(cls).items() if k != "heads"})
    assert layer.get_config()["heads"] == layer.heads == (most if most == 4 else 8)
    assert cls(heads=2).heads == 2 and cls().get_config()["heads"] is None


@pytest.mark.one_backend
@each_headed
def test_an_odd_width_has_one_head_or_one_line(kind):
    layer = MIXERS.get(kind)()
    try:
        layer.build((None, None, 7))
        assert layer.heads == 1
    except ValueError as error:
        assert re.fullmatch(
            r"\w+: heads must divide the width into multiples of 2, got heads None, width 7", str(error)
        )


@pytest.mark.one_backend
@each_default
def test_the_shape_stays_at_any_length(cls, options):
    layer = built(cls, options)
    for n in (1, 8, N):
        assert outputs(layer, normal(B, n, D)).shape == (B, n, D)


def chosen_alike(layer, exact, x):
    """The output of `exact`, in float32, on what `layer` feeds its kernel: what is chosen by it is the same."""
    inputs, rest = layer.enter(ops.cast(x, layer.compute_dtype), None)
    wide = {name: ops.cast(part, "float32") for name, part in inputs.items()}
    return to_numpy(exact.leave(exact.spec.fast(**wide, **exact.case), rest))


@tiers.full_on_jax
@some_plain_layers
@pytest.mark.parametrize("policy", tiers.thinned(["float32", "bfloat16", "mixed_bfloat16"], "mixed_bfloat16"))
def test_the_dtype_policy_decides_the_dtypes_of_weights_and_output(cls, policy):
    layer, x = built(cls, defaults(cls), policy), normal(B, N, D)
    out = on_jax_compiled(layer.__call__)(ops.convert_to_tensor(x))
    assert keras.backend.standardize_dtype(out.dtype) == keras.DTypePolicy(policy).compute_dtype
    assert {w.dtype for w in layer.weights} == {keras.DTypePolicy(policy).variable_dtype}
    exact = built(cls, defaults(cls))
    want = chosen_alike(layer, exact, x) if getattr(cls, "chooses", False) else outputs(exact, x)
    assert relative_error(to_numpy(out), want) < BFLOAT16_LAYER


@tiers.full_on_jax
@some_plain_layers
@pytest.mark.parametrize(
    "around",
    [
        pytest.param(lambda layer: layer, id="alone", marks=pytest.mark.full),
        pytest.param(ResidualBlock, id="in_a_block"),
    ],
)
def test_a_layer_saved_in_a_model_comes_back_with_equal_outputs(cls, around, tmp_path):
    layer, x = around(built(cls, defaults(cls))), normal(B, N, D)
    inputs = keras.Input((None, D))
    keras.Model(inputs, layer(inputs)).save(tmp_path / "layer.keras")
    assert np.array_equal(outputs(keras.saving.load_model(tmp_path / "layer.keras"), x), outputs(layer, x))


@pytest.mark.parametrize(arguments, tiers.of_kinds(defaults_once, "flash", "self_attention", "glu"))
def test_xla_compiles_to_the_same_output(cls, options):
    layer, x = built(cls, options), normal(B, N, D)
    masked = masks("packed" if packs(layer) else "padded") if hasattr(layer, "align") else {}
    got = compiled(lambda arrays: layer(**arrays))(tensors({"x": x, **masked}, "float32"))
    real = real_tokens(masked)
    assert relative_error(at(real, to_numpy(got)), at(real, outputs(layer, x, **masked))) < FLOAT32


@each_feedforward
def test_a_feedforward_layer_sees_each_token_alone(cls, options):
    layer, x = built(cls, options), normal(B, N, D)
    alone = outputs(layer, x.reshape(B * N, 1, D)).reshape(B, N, D)
    assert relative_error(outputs(layer, x), alone) < FLOAT32


@pytest.mark.one_backend
@each_mixer
# A mask alone: `test_masks` puts what is no number there.
@pytest.mark.parametrize("layout", tiers.thinned(["padded", "packed"], "packed"))
@pytest.mark.full
def test_garbage_at_padding_changes_no_output(cls, options, layout):
    layer, x, masked = built(cls, options), normal(B, N, D), masks(layout)
    if layout == "packed" and not packs(layer):
        with pytest.raises(ValueError, match=f"{cls.__name__} .* it needs segment_ids None, got packed documents"):
            outputs(layer, x, **masked)
        return
    real = real_tokens(masked)
    dirty = np.where(real[..., None], x, 1e4 * normal(B, N, D, seed=2))
    assert np.array_equal(at(real, outputs(layer, dirty, **masked)), at(real, outputs(layer, x, **masked)))


@pytest.mark.one_backend
@each_causal_mixer
def test_a_packed_document_equals_itself_alone(cls, options):
    layer = built(cls, options)
    c = max(layer.align, 8)
    assert c % layer.align == 0
    starts, lengths = [0, 3 * c, 4 * c], [2 * c + 1, c, 2 * c + 1]  # what is between two documents is padding
    x, segment_ids = normal(B, 7 * c, D), np.zeros([B, 7 * c], "int32")
    for name, first, length in zip((5, 2, 9), starts, lengths, strict=True):
        segment_ids[:, first : first + length] = name
    packed = outputs(layer, x, segment_ids=segment_ids)
    for first, length in zip(starts, lengths, strict=True):
        span = slice(first, first + length)
        assert relative_error(packed[:, span], outputs(layer, x[:, span])) < FLOAT32


@pytest.mark.one_backend
@each_mixer
def test_a_mixer_can_decode_exactly_when_a_prefix_gives_the_same_outputs_as_the_whole(cls, options):
    layer, x = built(cls, options), normal(B, N, D)
    whole = outputs(layer, x)
    found = [relative_error(outputs(layer, x[:, :m]), whole[:, :m]) for m in (8, 17)]
    same = max(found) < FLOAT32
    assert same == (layer.state_bytes(N) is not None), found


@pytest.mark.one_backend
@each_causal_mixer
def test_no_output_of_a_causal_mixer_has_a_gradient_from_a_later_token(cls, options):
    # One text N times over. Row i differentiates token i alone, so its gradient is row i of the Jacobian.
    layer = built(cls, options)
    arrays = tensors({"x": np.repeat(normal(1, N, D), N, axis=0)}, "float32")
    cotangent = lambda shape: at(np.eye(N, dtype=bool), normal(*shape, seed=1))  # noqa: E731
    _, gradients = value_and_gradients(layer, arrays, cotangent)
    jacobian = to_numpy(gradients["x"])
    assert not at(np.triu(np.ones([N, N], bool), k=1), jacobian).any()
    assert at(np.tril(np.ones([N, N], bool), k=-1), jacobian).any()


@pytest.mark.one_backend
@pytest.mark.parametrize(arguments, tiers.of_kinds(defaults_once, "flash", "gau", "linear_attention", "self_attention"))
def test_output_and_every_gradient_are_alive_at_initialization(cls, options):
    n, width = 512, 768  # weights of N(0, 0.02) are made for wide models
    layer = cls(**{**options, **{k: 128 for k in ("chunk_size", "key_dim") if k in options}})
    layer.build((1, n, width))

    start = {v.path: v.value for v in layer.trainable_variables}

    def function(x, **weights):
        return layer.stateless_call([weights[name] for name in start], [], x)[0]

    arrays = {**tensors({"x": normal(1, n, width)}, "float32"), **start}
    out, gradients = value_and_gradients(function, arrays, lambda shape: normal(*shape, seed=1))
    least, most = ALIVE_OUTPUT
    assert least < rms(out) < most
    found = {name: rms(gradients[name]) for name in start}
    least, most = ALIVE_GRADIENT
    sizes = [size / FAINT.get(name.partition("/")[2], 1) for name, size in found.items()]
    assert least * np.median(list(found.values())) < min(sizes), found
    assert max(found.values()) < most * n**0.5, found


def model_of(kind):
    """A small language model over the mixer, and token ids for it."""
    options = {k: v for k, v in SMALL.items() if k in defaults(MIXERS.get(kind))}
    feedforward = None if MIXERS.get(kind).gated_unit else {"type": "glu"}
    options = {"vocabulary_size": 50, "width": D, "depth": 2, "mixer": {"type": kind, **options}}
    task = "masked_lm" if never_causal(MIXERS.get(kind)) else "causal_lm"
    model = MODELS.build({"type": task, **options, "feedforward": feedforward})
    model.build()
    return model, np.random.default_rng(0).integers(0, 50, [B, N]).astype("int32")


@pytest.mark.one_backend
@some_plain_mixers
def test_lora_on_every_dense_layer_changes_no_output_and_freezes_the_kernels(kind):
    model, ids = model_of(kind)
    before, trained = to_numpy(model(ids)), {v.path for v in model.trainable_variables}
    dense = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dense)]
    kernels = {layer.kernel.path for layer in dense}
    assert len(dense) >= 2 * model.depth and kernels < trained
    for layer in dense:
        layer.enable_lora(2)
    added = {v.path for layer in dense for v in (layer.lora_kernel_a, layer.lora_kernel_b)}
    assert {v.path for v in model.trainable_variables} == trained - kernels | added
    assert relative_error(to_numpy(model(ids)), before) < FLOAT32
    for layer in dense:
        layer.lora_kernel_b.assign(normal(*layer.lora_kernel_b.shape))
    assert relative_error(to_numpy(model(ids)), before) > FLOAT32


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", tiers.thinned(MIXERS.names(), "flash"))
def test_int8_keeps_the_outputs_of_a_model_close(kind):
    model, ids = model_of(kind)
    before = to_numpy(model(ids))
    model.quantize("int8")
    dense = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dense)]
    assert {layer.kernel.dtype for layer in dense} == {"int8"}
    assert 0 < relative_error(to_numpy(model(ids)), before) < INT8
