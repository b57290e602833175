"""An artifact holds the step that `train` runs, its arguments and their initial values."""

import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from flash_tf import config, owned_files
from flash_tf.compiling import artifact, manifest, programs, values
from flash_tf.compiling.programs import Experiment, TokenIds
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training import modelling
from flash_tf.training.trainer import TrainStep
from tests import numerics
from tests.training import runs


def experiment_of(folder, *overrides, **sections):
    """A tiny masked experiment without a tokenizer."""
    sections["model"] = {"depth": 1, **sections.get("model", {})}
    path = runs.write(folder, **sections)
    return Experiment(*artifact.resolve(config.load(path, overrides)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A tiny causal experiment with a clipped gradient, its artifact's folder, and what `export` returned."""
    folder = tmp_path_factory.mktemp("exported")
    experiment = experiment_of(
        folder,
        model={"type": "causal_lm", **runs.SMALLEST},
        optimizer={"clip": {"scope": "global", "norm": 1.0}},
    )
    out = folder / "artifact"
    return experiment, out, artifact.export("tiny", experiment, str(out), None, lambda line: None)


def test_an_artifact_has_all_its_files_and_the_manifest_reads_back(exported):
    experiment, out, summary = exported
    assert {path.name for path in out.iterdir()} - {owned_files.MANIFEST} == set(summary["files"]) == {
        "step.hlo.pb", "step.stablehlo.mlir", "check.hlo.pb", "decode.hlo.pb", "manifest.json", "config.yaml",
    }  # fmt: skip
    made = manifest.read(str(out))
    assert made.config == json.loads((out / "manifest.json").read_text())["config"]
    assert config.load(str(out / "config.yaml")) == experiment.config
    assert summary["flops_per_step"] == modelling.training_flops_per_step(experiment.config, experiment.model)
    assert made.parameters == sum(
        v.shape.num_elements() for v in (v.value for v in experiment.model.trainable_variables)
    )
    assert "stablehlo." in (out / "step.stablehlo.mlir").read_text()


def test_a_step_takes_a_batch_its_number_its_rate_and_every_variable_each_of_which_it_replaces(exported):
    experiment, out, _ = exported
    made = manifest.read(str(out))
    step = made.programs["step"]
    weights = {v.path: tuple(v.shape) for v in experiment.model.trainable_variables}
    names = [argument.name for argument in step.arguments]
    assert names[:3] == ["tokens", "step", "rate"] and step.arguments[0].shape == (4, runs.LENGTH + 1)
    found = {argument.name: argument.shape for argument in step.arguments[3:]}
    assert found == {f"{slot}{name}": shape for name, shape in weights.items() for slot in ("", "m/", "v/")}
    assert step.replaces == {result: result + 2 for result in range(1, 1 + 3 * len(weights))}
    assert (step.tokens, step.batch_size, step.sequence_length) == (4 * runs.LENGTH, 4, runs.LENGTH)


def as_train_does(experiment):
    """The experiment's step as `train` runs it on an accelerator: XLA compiles the gradients alone."""
    step = TrainStep(experiment.model, experiment.objective, experiment.optimizer, experiment.config, True)
    return tf.function(lambda batch, at: step(batch, at), autograph=False)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_the_step_compiled_whole_gives_the_losses_of_the_step_of_train(tmp_path, precision):
    sections = {"model": {"dropout": 0.2}, "optimizer": {"clip": {"scope": "replica", "norm": 0.5}}}
    experiment = experiment_of(tmp_path, f"train.precision={precision}", **sections)
    shapes = {argument.name: argument.shape for argument in experiment.batch(4, runs.LENGTH)}
    batch = {name: tf.constant(x) for name, x in values.made_up(shapes, runs.VOCABULARY, 0).items()}
    whole = tf.function(experiment.train_step, autograph=False, jit_compile=True)
    train, losses = as_train_does(experiment), {}
    for name in ("whole", "train"):
        experiment.assign_initial_values()
        losses[name] = []
        for done in range(4):
            at = tf.constant(done, tf.int64)
            record = whole(batch, at, experiment.optimizer.rate(at)) if name == "whole" else train(batch, at)
            losses[name].append(record.numpy())
    # In bfloat16 too: XLA compiles the gradients of both, and rounds equally.
    np.testing.assert_allclose(losses["whole"], losses["train"], rtol=numerics.FLOAT32_RUN)
    assert losses["train"][-1][0] < losses["train"][0][0]


def test_variables_begin_with_the_values_that_anyone_can_make_from_the_manifest(exported):
    experiment, out, _ = exported
    experiment.assign_initial_values()
    made = manifest.read(str(out))
    weights = {v.path: v.numpy() for v in experiment.model.trainable_variables}
    for argument in made.programs["step"].arguments:
        if argument.role == "weight":
            want = values.initial(argument.name, argument.shape, argument.initializer, made.seed)
            np.testing.assert_array_equal(weights[argument.name], want)
    kinds = {argument.initializer["kind"] for argument in made.programs["step"].arguments if argument.initializer}
    assert kinds == {"normal", "constant"}


def test_initial_values_follow_from_seed_and_name_and_have_the_asked_moments():
    normal = {"kind": "normal", "mean": 0.5, "stddev": 0.02}
    draw = lambda name, seed: values.initial(name, (400, 500), normal, seed)  # noqa: E731
    np.testing.assert_array_equal(draw("a", 0), draw("a", 0))
    correlation = np.corrcoef([draw(*one).ravel() for one in (("a", 0), ("b", 0), ("a", 1))])
    assert np.abs(correlation - np.eye(3)).max() < 5 / np.sqrt(200_000)
    assert draw("a", 0).dtype == np.float32
    assert draw("a", 0).mean() == pytest.approx(0.5, abs=5 * 0.02 / np.sqrt(200_000))
    assert draw("a", 0).std() == pytest.approx(0.02, rel=5 / np.sqrt(2 * 200_000))
    assert values.initial("a", (), normal, 0).shape == ()
    with pytest.raises(ValueError, match="a: an initializer must be normal, uniform, .*, got 'orthogonal'"):
        values.initial("a", (), {"kind": "orthogonal"}, 0)


def test_even_numbers_and_given_ones_come_back():
    even = values.initial("a", (400, 500), {"kind": "uniform", "low": -0.5, "high": 1.5}, 0)
    assert even.dtype == np.float32 and -0.5 <= even.min() < -0.49 and 1.49 < even.max() < 1.5
    assert even.mean() == pytest.approx(0.5, abs=5 * 2 / np.sqrt(12 * 200_000))
    numbers = np.float32([[0.1, -2.0], [3.5, 1e-30]])
    np.testing.assert_array_equal(values.initial("a", (2, 2), values.given(numbers), 0), numbers)


@pytest.mark.full
def test_a_weight_that_is_not_trained_is_an_argument_that_no_result_replaces_and_no_constant(tmp_path):
    mixer = {"type": "linear_attention", "heads": 2, "features": "favor"}
    experiment = experiment_of(tmp_path, model={"type": "causal_lm", "depth": 1, "mixer": mixer})
    artifact.export("tiny", experiment, str(tmp_path / "artifact"), None, lambda line: None)
    made = manifest.read(str(tmp_path / "artifact"))
    (frozen,) = experiment.model.non_trainable_weights
    for name in ("step", "decode"):
        program = made.programs[name]
        at = [argument.name for argument in program.arguments].index(frozen.path)
        assert program.arguments[at].role == "weight" and at not in program.replaces.values()
        argument = program.arguments[at]
        want = values.initial(argument.name, argument.shape, argument.initializer, made.seed)
        np.testing.assert_array_equal(want, frozen.numpy())
    lines = (tmp_path / "artifact" / "step.stablehlo.mlir").read_text().splitlines()
    assert not any("128x8xf32" in line and 'stablehlo.constant dense<"' in line for line in lines)
    assert made.parameters == sum(v.shape.num_elements() for v in experiment.optimizer.variables.values())


@pytest.mark.parametrize("mixer", [{"type": "diag_attention", "heads": 2}, {"type": "mamba", "state_size": 4}], ids=str)
def test_weights_that_begin_by_a_rule_of_their_own_are_in_the_manifest(mixer):
    loaded = config.load("wikitext2_lm/flash", [f"model.mixer={json.dumps(mixer)}", "model.vocabulary_size=100"])
    experiment = programs.Experiment(*artifact.resolve(loaded))
    before = {v.path: v.numpy() for v in experiment.model.trainable_variables}
    held = {argument.name: argument.initializer for _, argument in experiment._held}
    experiment.assign_initial_values()
    of_its_own = [path for path, one in held.items() if one["kind"] == "given"]
    assert of_its_own
    for path in of_its_own:
        after = {v.path: v.numpy() for v in experiment.model.trainable_variables}[path]
        np.testing.assert_array_equal(after, before[path])


def test_an_initializer_that_no_one_else_can_make_is_named():
    assert programs._plain("w", (), keras.initializers.Constant(0.5)) == {"kind": "constant", "value": 0.5}
    with pytest.raises(
        ValueError,
        match="w needs an initializer .*RandomNormal, .* and constants.*, got GlorotUniform",
    ):
        programs._plain("w", (2, 2), keras.initializers.GlorotUniform())


def test_the_ids_without_a_tokenizer_are_those_of_one_that_is_trained(tmp_path):
    runs.corpus(tmp_path)
    trained = Tokenizer.train(iter((tmp_path / "train.txt").read_text().splitlines()), runs.VOCABULARY)
    ids = TokenIds(runs.VOCABULARY)
    for name in ("pad_id", "eos_id", "mask_id", "cls_id", "special_ids", "vocabulary_size"):
        assert getattr(ids, name) == getattr(trained, name)


def test_whole_words_without_a_tokenizer_cannot_be_exported(tmp_path):
    with pytest.raises(ValueError, match="masking.whole_words needs data.tokenizer"):
        experiment_of(tmp_path, masking={"whole_words": True})


@pytest.mark.parametrize("tokens", [0, -1, 48])
def test_tokens_of_the_check_that_make_no_batch_are_refused(exported, tmp_path, tokens):
    with pytest.raises(
        ValueError, match=rf"--check-tokens must be a multiple of data.sequence_length \(32\).* got {tokens}"
    ):
        artifact.export("tiny", exported[0], str(tmp_path / "out"), tokens, lambda line: None)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_else_is_refused_and_left_as_it_is(exported, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds mine.txt, which flash-tf compile did not write"):
        artifact.export("tiny", exported[0], str(tmp_path), None, lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match="mine.txt needs to be a folder, and .*mine.txt is a file"):
        artifact.export("tiny", exported[0], str(tmp_path / "mine.txt"), None, lambda line: None)


@pytest.mark.parametrize("name", ["tokenizer.model", "config.yaml"])
def test_a_users_file_with_the_name_of_ours_is_refused_and_stays(exported, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds {name}, which flash-tf compile did not write"):
        artifact.export("tiny", exported[0], str(tmp_path), None, lambda line: None)
    assert runs.contents(tmp_path) == {name: b"mine"}


def test_an_artifact_that_is_not_made_to_the_end_leaves_the_one_before(exported, tmp_path, monkeypatch):
    shutil.copytree(exported[1], tmp_path / "out")
    before = runs.contents(tmp_path)

    def stopped(line):
        if line.startswith("tracing the check"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        artifact.export("tiny", exported[0], str(tmp_path / "out"), None, stopped)
    assert runs.contents(tmp_path) == before


def test_an_artifact_from_before_hashes_is_replaced_unless_it_holds_other_files(exported, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(exported[1], out)
    (out / owned_files.MANIFEST).unlink()
    artifact.check_folder(str(out))
    (out / "tokenizer.model").write_text("mine")  # its config has none
    with pytest.raises(ValueError, match="holds tokenizer.model, which flash-tf compile did not write"):
        artifact.check_folder(str(out))
