"""Exported decoding: JAX chooses the tokens that TensorFlow chooses, and continues from its last state."""

import jax
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.compiled_program import Compiled, initial_variables
from flash_tf import config
from flash_tf.compiling import artifact, hlo, manifest
from flash_tf.compiling.programs import Experiment
from flash_tf.generation import greedy
from tests.numerics import FLOAT32, relative_error
from tests.training import runs

ROWS, STEPS = 3, artifact.DECODE_TOKENS  # several texts, whose tokens scatters write
MIXERS = {"flash": runs.MIXER, "gau": {"type": "gau", "key_dim": 8}}
LENGTH = 2 * STEPS  # room for two calls


def experiment_of(folder, **model):
    folder.mkdir(exist_ok=True)
    sizes = {"data": {"sequence_length": LENGTH}, "train": {"tokens_per_step": LENGTH}}
    path = runs.write(folder, model={"type": "causal_lm", **model}, **sizes)
    return Experiment(*artifact.resolve(config.load(path)))


@pytest.fixture(scope="module", params=MIXERS)
def exported(request, tmp_path_factory):
    """An experiment and its artifact's folder."""
    folder = tmp_path_factory.mktemp(request.param)
    experiment = experiment_of(folder, mixer=MIXERS[request.param])
    artifact.export("tiny", experiment, str(folder / "artifact"), None, lambda line: None, decode_batch=ROWS)
    return experiment, str(folder / "artifact")


def large_weights(experiment):
    """Gives the experiment weights with which the model does not repeat itself. Returns them by name."""
    rng, made = np.random.default_rng(6), {}
    for weight in experiment.model.trainable_variables:
        made[weight.path] = (np.round(weight.numpy()) + 0.5 * rng.normal(size=weight.shape)).astype("float32")
        weight.assign(made[weight.path])
    return made


@pytest.mark.full
def test_exported_decoding_chooses_what_tensorflow_does_from_nothing_and_from_the_state_that_it_left(exported):
    experiment, folder = exported
    made, device, weights = manifest.read(folder), jax.devices("cpu")[0], large_weights(experiment)
    decode = Compiled(folder, made.programs["decode"], device)
    variables = initial_variables(made, decode.program, device)
    variables |= {name: jax.device_put(x, device) for name, x in weights.items()}
    model, token = experiment.model, np.array([5, 9, 70], "int32")
    state = model.initial_state(ROWS, LENGTH if model.mixers[0].grows else None)
    ours = tf.function(lambda token, state: greedy(model, token, state, STEPS), autograph=False)
    for _ in range(2):
        chosen = np.asarray(decode(variables, {"token": jax.device_put(token, device)}))
        want, state = ours(tf.constant(token), state)
        assert chosen.tolist() == want.numpy().tolist()
        assert all(len(set(row)) > 5 for row in chosen.tolist())
        for name in state:
            assert relative_error(variables[name], state[name]) < FLOAT32, name
        token = chosen[:, -1]
    assert np.asarray(variables["position"]).tolist() == [2 * STEPS] * ROWS


@pytest.mark.full
def test_each_entry_of_the_state_is_an_argument_that_a_result_replaces(exported):
    experiment, folder = exported
    program = manifest.read(folder).programs["decode"]
    grows = experiment.model.mixers[0].grows
    state = experiment.model.initial_state(ROWS, LENGTH if grows else None)
    token, *given = program.arguments[: 1 + len(state)]
    assert (token.name, token.role, token.shape) == ("token", "token", (ROWS,))
    assert [(a.name, a.role, a.shape) for a in given] == [(k, "state", tuple(state[k].shape)) for k in sorted(state)]
    weights = {v.path for v in experiment.model.trainable_variables}
    assert {(a.name, a.role) for a in program.arguments[1 + len(state) :]} == {(name, "weight") for name in weights}
    assert program.replaces == {i: i for i in range(1, 1 + len(state))} and program.results == ("chosen",)
    assert (program.tokens, program.capacity) == (ROWS * STEPS, LENGTH if grows else None)
    with open(f"{folder}/{program.file}", "rb") as file:
        loaded = hlo.load(file.read())
    assert loaded.replaces == program.replaces
    assert loaded.text.count("unique_indices = true") == loaded.text.count('"stablehlo.scatter"') > 0


def test_decoding_of_a_bounded_model_ends_at_its_capacity(tmp_path):
    small = {"mixer": MIXERS["gau"], "depth": 1}
    assert artifact._decoded(experiment_of(tmp_path / "long", **small), None) == (1, STEPS)
    for model in ({"mixer": MIXERS["gau"]}, {"position_embedding": "learned"}):
        path = runs.write(tmp_path, model={"type": "causal_lm", "depth": 1, **model})
        short = Experiment(*artifact.resolve(config.load(path)))
        assert artifact._decoded(short, 2) == (2, runs.LENGTH) and short.capacity == runs.LENGTH


@pytest.mark.full
def test_a_model_that_does_not_decode_has_no_decoding(tmp_path):
    small = {"mixer": MIXERS["gau"], "depth": 1}
    for name, model in {"masked": {"type": "masked_lm"}, "length": {"mixer": {"divisor": "length"}}}.items():
        options = {**small, **model, "mixer": {**small["mixer"], **model.get("mixer", {})}}
        experiment = experiment_of(tmp_path / name, **options)
        summary = artifact.export("tiny", experiment, str(tmp_path / name / "artifact"), None, lambda line: None)
        assert "decode.hlo.pb" not in summary["files"]
        assert set(manifest.read(str(tmp_path / name / "artifact")).programs) == {"step", "check"}
