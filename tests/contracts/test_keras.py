"""What Keras does with every model, it does with ours: training, callbacks, distribution, export, recomputation."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.layers import (
    GLU,
    LRPE,
    MLP,
    Mamba,
    MixedChunkAttention,
    OffsetScale,
    RelativeBias,
    ResidualBlock,
    RotaryEmbedding,
    ScaledSinusoidalEmbedding,
    ScaleNorm,
    SimpleRMSNorm,
)
from flash_tf.layers.mixers import MIXERS
from flash_tf.models import CausalLM, Classifier, MaskedLM, Matcher
from tests import backends, tiers
from tests.backends import to_numpy
from tests.contracts.test_mixers import defaults
from tests.numerics import FLOAT32, relative_error

V, D, N, CLASSES = 50, 32, 21, 3
# tf2onnx has no bit operations and no ArgMax of booleans, and it loses shapes of the others that depend on the length.
NOT_IN_ONNX = {"combiner", "diag_attention", "informer", "mc_tfm", "parallel", "reformer", "transformer_ls"}
IDS = np.random.default_rng(0).integers(1, V, (8, N)).astype("int32")
STACK = {"vocabulary_size": V, "width": D, "depth": 2, "mixer": {"type": "flash", "chunk_size": 8, "key_dim": 16}}


def functional(n=None, mixer=None, activation="gelu"):
    """A user's model in which padding is masked."""
    ids = keras.Input((n,), dtype="int32")
    x = keras.layers.Embedding(V, D, mask_zero=True)(ids)
    x = ResidualBlock(mixer or MixedChunkAttention(chunk_size=8, key_dim=16), dropout=0.1)(x)
    x = keras.layers.GlobalAveragePooling1D()(ResidualBlock(GLU(activation=activation))(x))
    return keras.Model(ids, keras.layers.Dense(CLASSES)(x))


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A user's model whose layers are its attributes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding, self.outer = keras.layers.Embedding(V, D), keras.layers.Dense(CLASSES)
        self.block = ResidualBlock(Mamba())

    def call(self, ids):
        return self.outer(ops.mean(self.block(self.embedding(ids)), axis=1))


MODELS = {
    "functional": lambda: functional(N if tiers.ON_JAX else None),  # on JAX an export has one length
    "subclassed": Subclassed,
    "causal_lm": lambda: CausalLM(**STACK, dropout=0.1),
    "masked_lm": lambda: MaskedLM(**STACK),
    "classifier": lambda: Classifier(CLASSES, max_length=N, **STACK),
    "matcher": lambda: Matcher(CLASSES, max_length=N, **STACK),
}
each_model = pytest.mark.parametrize("kind", tiers.thinned(list(MODELS), "functional"))
each_model_in_full = pytest.mark.parametrize("kind", tiers.thinned(list(MODELS)))


def made(kind, optimizer="adam"):
    """A compiled model with the same weights every time, its inputs and its labels."""
    keras.utils.set_random_seed(0)  # `fit` shuffles by TensorFlow's own seed
    model = MODELS[kind]()
    x = np.stack([IDS, IDS[:, ::-1]], axis=1) if kind == "matcher" else IDS
    model(x)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model, x, IDS if kind in ("causal_lm", "masked_lm") else IDS[:, 0] % CLASSES


def weights(model):
    return [to_numpy(w.value) for w in model.trainable_variables]


def equal(arrays, others):
    return all(np.array_equal(a, b) for a, b in zip(arrays, others, strict=True))


@each_model
def test_fit_lowers_the_loss_that_evaluate_tells_and_predict_gives_what_a_call_gives(kind):
    model, x, y = made(kind, keras.optimizers.AdamW(1e-2))
    before, _ = model.evaluate(x, y, batch_size=4, verbose=0)
    history = model.fit(x, y, batch_size=4, epochs=3, validation_data=(x, y), verbose=0).history
    after, _ = model.evaluate(x, y, batch_size=4, verbose=0)
    assert after < before
    assert abs(after - history["val_loss"][-1]) < FLOAT32 * before
    assert relative_error(model.predict(x, batch_size=4, verbose=0), to_numpy(model(x))) < FLOAT32


@each_model_in_full
def test_early_stopping_brings_back_the_weights_of_the_best_epoch(kind):
    model, x, y = made(kind, keras.optimizers.SGD(-0.1))  # uphill: the first epoch is the best
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(weights(model)))
    stop = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    model.fit(x, y, epochs=9, validation_data=(x, y), verbose=0, callbacks=[watch, stop])
    assert len(seen) == 3 and not equal(seen[0], seen[2])
    assert equal(weights(model), seen[0])


@each_model_in_full
def test_tensorboard_has_the_curve_and_the_weights_of_every_layer(kind, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, x, y = made(kind)
    model.fit(x, y, epochs=2, verbose=0, callbacks=[keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)])
    found = EventAccumulator(str(tmp_path / "train"), size_guidance={"tensors": 0}).Reload()
    assert len(found.Tensors("epoch_loss")) == 2
    drawn = {tag for tag in found.Tags()["tensors"] if tag.endswith("histogram")}
    assert len(drawn) >= len({w.path for layer in model.layers for w in layer.trainable_variables})


@each_model_in_full
def test_a_checkpoint_of_fit_is_the_model_with_its_optimizer(kind, tmp_path):
    model, x, y = made(kind)
    keep = [
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
        keras.callbacks.ModelCheckpoint(tmp_path / "model.weights.h5", save_weights_only=True),
    ]
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=keep)
    again, (fresh, *_) = keras.saving.load_model(tmp_path / "model.keras"), made(kind)
    fresh.load_weights(tmp_path / "model.weights.h5")
    for one in (again, fresh):
        assert np.array_equal(to_numpy(one(x)), to_numpy(model(x)))
    assert int(again.optimizer.iterations) == 4
    assert equal(*([to_numpy(v.value) for v in one.optimizer.variables] for one in (again, model)))


@each_model_in_full
def test_the_weights_after_fit_are_the_mean_over_its_steps_with_use_ema(kind):
    model, x, y = made(kind, keras.optimizers.AdamW(1e-2))
    after = []
    for _ in range(2):
        model.fit(x, y, verbose=0)
        after.append(weights(model))
    averaged, *_ = made(kind, keras.optimizers.AdamW(1e-2, use_ema=True, ema_momentum=0.5))
    averaged.fit(x, y, epochs=2, verbose=0)
    for got, one, two in zip(weights(averaged), *after, strict=True):
        assert np.max(np.abs(got - (one + two) / 2)) < FLOAT32


ON_TWO_DEVICES = """
import jax, keras, numpy as np
from tests.contracts.test_keras import made, weights
from tests.numerics import FLOAT32

assert len(jax.devices()) == 2
found = []
for distributed in (False, True):
    if distributed:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    model, x, y = made("KIND", keras.optimizers.AdamW(1e-3, epsilon=1e-3))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    devices = {len(w.value.sharding.device_set) for w in model.trainable_variables}
    assert devices == {1 + distributed}, devices
    found.append([*weights(model), model.predict(x, verbose=0)])
for one, two in zip(*found, strict=True):
    assert np.max(np.abs(one - two)) < FLOAT32
"""


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", tiers.thinned(["functional", "masked_lm"]))
def test_two_devices_of_a_data_parallel_distribution_train_as_one(kind):
    flags = {"KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = ON_TWO_DEVICES.replace("KIND", kind)
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **flags}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@each_model_in_full
def test_a_saved_model_of_export_takes_ids_and_gives_the_outputs(kind, tmp_path):
    import tensorflow as tf

    model, x, _ = made(kind)
    model.export(tmp_path / "saved", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "saved"))  # its functions do not keep it
    ids = x.astype("float32") if kind == "subclassed" else x  # Keras' guess where a model says nothing
    for rows in (1, 8):
        assert relative_error(np.array(served.serve(ids[:rows])), to_numpy(model(x[:rows]))) < FLOAT32


@pytest.mark.one_backend
@pytest.mark.full
def test_a_saved_model_takes_texts_of_any_length_where_its_signature_says_so(tmp_path):
    import tensorflow as tf

    model, x, _ = made("causal_lm")
    model.export(tmp_path / "saved", verbose=False, input_signature=[keras.InputSpec("int32", (None, None))])
    served = tf.saved_model.load(str(tmp_path / "saved"))  # its functions do not keep it
    for n in (1, 8, N):
        assert relative_error(np.array(served.serve(x[:, :n])), to_numpy(model(x[:, :n]))) < FLOAT32


@pytest.mark.one_backend
@pytest.mark.parametrize("make", tiers.thinned([lambda: functional(N), MODELS["causal_lm"], MODELS["classifier"]]))
def test_a_litert_file_of_export_gives_the_outputs(make, tmp_path):
    import tensorflow as tf

    model = make()
    want = to_numpy(model(IDS))
    model.export(str(tmp_path / "model.tflite"), format="litert", verbose=False)
    interpreter = tf.lite.Interpreter(str(tmp_path / "model.tflite"))
    (given,), (found,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], IDS.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], IDS)
    interpreter.invoke()
    assert relative_error(interpreter.get_tensor(found["index"]), want) < FLOAT32


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", tiers.thinned(sorted(set(MIXERS.names()) - NOT_IN_ONNX)))
def test_an_onnx_file_of_export_gives_the_outputs_at_any_length(kind, tmp_path):
    import onnxruntime

    model = functional(mixer=mixer(kind), activation="silu")  # the converter does not know TensorFlow's gelu
    path = str(tmp_path / "model.onnx")
    model(IDS)
    model.export(path, format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(path)
    for n in (8, N):
        ids = np.where(np.arange(n) < n - np.arange(8)[:, None], IDS[:, :n], 0)  # with padding
        (found,) = session.run(None, {session.get_inputs()[0].name: ids})
        assert relative_error(found, to_numpy(model(ids))) < FLOAT32, n


def mixer(kind, **more):
    return MIXERS.get(kind)(**defaults(MIXERS.get(kind)), **more)


def recomputes(layer, x):
    """Whether the backward pass of `layer(x)` computes the layer again."""
    if tiers.ON_JAX:
        import jax

        return "remat" in str(jax.make_jaxpr(layer)(x))
    import tensorflow as tf

    calls, call = [], layer.call
    layer.call = lambda *args, **kwargs: calls.append(1) or call(*args, **kwargs)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = ops.sum(layer(x))
    tape.gradient(loss, x)
    layer.call = call
    return len(calls) == 2


@pytest.mark.parametrize("kind", tiers.thinned(MIXERS.names(), "flash"))
@pytest.mark.parametrize("mode", tiers.thinned(["full", "larger_than", "list_of_layers"], "full"))
def test_a_mixer_made_in_a_remat_scope_is_computed_again_and_trains_alike(kind, mode):
    x, y, found = np.random.default_rng(1).normal(size=(4, N, D)).astype("float32"), np.ones((4, N, D)), []
    for scope in (None, mode):
        backends.seed(0)
        with keras.RematScope(scope, output_size_threshold=1, layer_names=["again"]):
            layer = type(mixer(kind))(**defaults(MIXERS.get(kind)), name="again")
            layer.build(x.shape)
        assert recomputes(layer, ops.convert_to_tensor(x)) == (scope is not None)
        inputs = keras.Input((N, D))
        model = keras.Model(inputs, layer(inputs))
        model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
        model.train_on_batch(x, y)
        found.append(weights(model))
    assert all(relative_error(a, b) < FLOAT32 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", tiers.thinned([kind for kind in MODELS if kind not in ("functional", "subclassed")]))
@pytest.mark.parametrize("mode", ["full", "larger_than"])
def test_a_model_made_in_a_remat_scope_computes_its_blocks_again_and_trains_alike(kind, mode):
    found = []
    for scope in (None, mode):
        with keras.RematScope(scope, output_size_threshold=1):
            model, x, y = made(kind, keras.optimizers.SGD(1.0))
        model.train_on_batch(x, y)
        assert [block.remat for block in model.blocks] == [scope is not None] * len(model.blocks)
        found.append(weights(model))
    assert all(relative_error(a, b) < FLOAT32 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("layer", [GLU, MLP, ScaleNorm, SimpleRMSNorm, MixedChunkAttention], ids=lambda x: x.__name__)
def test_a_layer_of_one_shape_is_spread_over_time(layer):
    one = layer()
    x = keras.Input((3, N if tiers.ON_JAX else None, D))
    model = keras.Model(x, keras.layers.TimeDistributed(one)(x))
    value = np.random.default_rng(0).normal(size=(2, 3, N, D)).astype("float32")
    alone = np.stack([to_numpy(one(value[:, i])) for i in range(3)], axis=1)
    assert relative_error(to_numpy(model(value)), alone) < FLOAT32


@pytest.mark.parametrize("kind", tiers.thinned(list(MODELS), "subclassed", "masked_lm"))
def test_a_summary_has_a_line_for_each_layer(kind, capsys):
    model = MODELS[kind]()
    model(np.stack([IDS, IDS], axis=1) if kind == "matcher" else IDS)
    model.summary(expand_nested=True, line_length=200)
    lines = capsys.readouterr().out
    assert all(f" {layer.name} " in lines for layer in model.layers)


def test_a_text_without_a_batch_is_refused_in_one_line_by_every_mixer_and_block():
    for layer in [*map(mixer, MIXERS.names()), ResidualBlock(mixer("flash"))]:
        for shape in ((N, D), (2, 2, N, D)):
            with pytest.raises(ValueError, match=f"^[^\n]*expected ndim=3, found ndim={len(shape)}[^\n]*$"):
                layer(np.zeros(shape, "float32"))


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", tiers.thinned(MIXERS.names(), "gla", "combiner", "parallel"))
@pytest.mark.parametrize("n", tiers.thinned([N, None], None))
def test_a_replica_without_rows_has_gradients_of_zero(kind, n):
    import tensorflow as tf

    layer = mixer(kind)
    layer.build((None, n, D))

    @tf.function(input_signature=[tf.TensorSpec((None, n, D))])
    def step(x):
        with tf.GradientTape() as tape:
            out = layer(x, training=True)
            loss = tf.reduce_sum(out**2)
        return tape.gradient(loss, layer.trainable_variables), out

    gradients, out = step(tf.zeros((0, N, D)))  # as of a last batch that is smaller than the number of replicas
    found = [to_numpy(x) for x in gradients if x is not None]
    assert out.shape == (0, N, D) and found and not any(map(np.any, found))


@pytest.mark.parametrize("kind", ["mamba", "flash", "parallel"])
def test_a_bidirectional_wrapper_is_refused_in_one_line_that_names_the_alternatives(kind):
    with pytest.raises(ValueError, match="^keras.layers.Bidirectional needs a recurrent layer, got .*causal=False.*$"):
        keras.layers.Bidirectional(mixer(kind))


FREEZABLE = {
    **{kind: (lambda kind=kind, **frozen: mixer(kind, **frozen)) for kind in MIXERS.names()},
    "glu": GLU,
    "block": lambda **frozen: ResidualBlock(GLU(), **frozen),
}


@pytest.mark.parametrize("kind", tiers.thinned(FREEZABLE, "flash"))
def test_a_frozen_layer_stays_frozen_when_it_is_built_and_in_a_file(kind, tmp_path):
    x = keras.Input((N, D))
    models = []
    for layer in (FREEZABLE[kind](trainable=False), FREEZABLE[kind]()):
        models.append(keras.Model(x, keras.layers.Dense(3)(layer(x))))
        layer.trainable = False
    models[1].save(tmp_path / "model.keras")
    models.append(keras.models.load_model(tmp_path / "model.keras"))
    head = 2
    assert [len(model.trainable_weights) for model in models] == [head] * 3
    models[2].layers[1].trainable = True
    assert len(models[2].trainable_weights) > head


@pytest.mark.parametrize("layer", [RotaryEmbedding(), LRPE()], ids=["rotary", "lrpe"])
def test_positions_that_reduced_precision_has_rounded_are_refused(layer):
    positions, x = np.arange(301, 306)[None].astype("float32"), np.ones((1, 5, 2, 4), "float32")
    layer(x, positions=positions)
    with pytest.raises(ValueError, match="positions need a dtype of integers, got .*bfloat16"):
        type(layer)(dtype="mixed_bfloat16")(x, positions=positions)


@pytest.mark.one_backend
def test_segment_ids_that_reduced_precision_has_rounded_are_refused():
    x, ids = np.ones((1, 6, 8), "float32"), np.repeat([1001, 1002], 3)[None].astype("float32")
    layer = MIXERS.get("self_attention")(heads=2, causal=True, dtype="mixed_bfloat16")
    with pytest.raises(ValueError, match="segment_ids need a dtype of integers, got .*bfloat16"):
        layer(x, segment_ids=ids)
    layer(x, segment_ids=ids.astype("int32"))


LIMITED = {
    "cosine_length": lambda: MIXERS.get("linear_attention")(heads=2, features="relu", cosine_length=6, rotary=False),
    "Linformer": lambda: MIXERS.get("linformer")(heads=2, rank=2, max_length=6),
}


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX knows every length")
@pytest.mark.parametrize("name", LIMITED)
def test_a_longer_text_of_unknown_length_is_refused_and_where_xla_drops_the_check_the_result_is_nan(name):
    import tensorflow as tf

    layer, x = LIMITED[name](), np.ones((1, 9, 8), "float32")
    signature = [tf.TensorSpec([None, None, 8])]
    for compiled in (False, True):
        run = tf.function(layer, input_signature=signature, jit_compile=compiled)
        assert np.isfinite(run(x[:, :6])).all()
        if compiled:
            assert np.isnan(run(x)).all()
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match="texts of at most .*=6 tokens, got"):
                run(x)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX knows every length")
def test_learned_positions_refuse_a_longer_text_of_unknown_length():
    import tensorflow as tf

    sizes = {"vocabulary_size": 11, "width": 8, "depth": 1, "mixer": {"type": "self_attention", "heads": 2}}
    model, ids = CausalLM(**sizes, position_embedding="learned", max_length=6), np.ones((1, 9), "int32")
    run = lambda compiled: tf.function(  # noqa: E731
        lambda ids: model(ids), input_signature=[tf.TensorSpec([None, None], "int32")], jit_compile=compiled
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="learned positions for max_length=6 tokens, got"):
        run(False)(ids)
    assert np.isnan(run(True)(ids)).all() and np.isfinite(run(True)(ids[:, :6])).all()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: MIXERS.get("mamba")()(keras.Input((None, None))),
            "Mamba needs an input whose last dimension is known",
        ),
        (lambda: ResidualBlock(GLU())(keras.Input((None, None))), "ResidualBlock needs an input whose last dimension"),
        (lambda: MIXERS.get("gau")(heads=0), "key_dim must be an even multiple of heads, 1 or more, got 128 and 0"),
        (lambda: OffsetScale(["q", "q"]), r"OffsetScale needs different names as heads, got \['q', 'q'\]"),
        (lambda: OffsetScale([]), r"OffsetScale needs different names as heads, got \[\]"),
        (lambda: RelativeBias(width=0), "RelativeBias needs an even width, 2 or more, got 0"),
        (lambda: ScaledSinusoidalEmbedding(-2), "ScaledSinusoidalEmbedding needs an even width, 2 or more, got -2"),
    ],
)
def test_what_a_layer_cannot_be_made_of_is_one_clear_error(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX knows every length")
def test_a_causal_layer_of_unknown_length_runs_where_keras_floats_have_16_bits():
    import tensorflow as tf

    before = keras.config.floatx()
    keras.config.set_floatx("bfloat16")
    try:
        x = tf.ones([1, 11, 16], "bfloat16")
        layer = MixedChunkAttention(chunk_size=8, key_dim=16, causal=True)
        whole = layer(x)
        traced = tf.function(layer, input_signature=[tf.TensorSpec([None, None, 16], "bfloat16")])
        np.testing.assert_allclose(*(np.asarray(tf.cast(y, "float32")) for y in (traced(x), whole)), atol=1e-2)
    finally:
        keras.config.set_floatx(before)
