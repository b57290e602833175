"""Which checkpoints count, which one a run continues from, and which ones stay."""

import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

import flash_tf as ft
from flash_tf import config
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.layers import random_features
from flash_tf.training import loop, modelling
from flash_tf.training.average import average
from flash_tf.training.checkpoints import MARKER, Checkpoints
from flash_tf.training.optimizer import AdamW
from flash_tf.training.restore import restore
from tests.training import jax_child, runs

DATA, INDEX = "variables.data-00000-of-00001", "variables.index"


def truncated_data(folder):
    data = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(data[: len(data) // 2])


def a_wrong_byte(folder):
    data = bytearray((folder / DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / DATA).write_bytes(data)


def missing_data(folder):
    (folder / DATA).unlink()


def garbage_index(folder):
    (folder / INDEX).write_bytes(bytes(range(256)) * 8)


def unreadable_marker(folder):
    (folder / MARKER).write_text('{"step": 8, "po')


def empty_marker(folder):
    (folder / MARKER).write_text("")


def a_value_that_is_no_number(folder):
    """A whole checkpoint, in which one number of one variable is NaN."""
    checkpoints, step = Checkpoints(str(folder.parent)), int(folder.name.removeprefix("step-"))
    keys = {name: name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE") for name in runs.state(folder.parent.parent, step)}
    found = {keys[name].replace("|", "/"): x for name, x in runs.state(folder.parent.parent, step).items()}
    found["masked_lm/output_bias"][7] = np.nan
    checkpoints.save({name: tf.Variable(x) for name, x in found.items()}, checkpoints.notes(step))


DAMAGES = [
    truncated_data,
    a_wrong_byte,
    missing_data,
    garbage_index,
    unreadable_marker,
    empty_marker,
    a_value_that_is_no_number,
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of eight steps, with checkpoints of steps 2 to 8."""
    folder = tmp_path_factory.mktemp("run")
    runs.corpus(folder)
    path = runs.write(folder, model=runs.SMALLEST, train={"keep": 4})
    runs.in_child(runs.train, path, folder / "model")
    return folder


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run / "model", tmp_path / "model")
    return tmp_path / "model"


def kept(values, shape=(2, 3)):
    """Variables for a checkpoint."""
    return {name: tf.Variable(tf.fill(shape, float(value))) for name, value in values.items()}


def variables(run):
    """The content of a checkpoint before the first step."""
    experiment = config.load(str(run / "config.yaml"))
    weights = {v.path: v.value for v in modelling.make_model(experiment).trainable_variables}
    return {**weights, **AdamW(experiment.optimizer, experiment.train.steps, weights).state()}


def newest(model_dir):
    return model_dir / "checkpoints/step-00000008"


def said(copy, **options):
    """The step that `restore` takes, and the lines that it says."""
    lines = []
    return restore(str(copy), lines.append, **options).step, lines


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(run, copy, damage):
    damage(newest(copy))
    lines, into = [], variables(run)
    notes = Checkpoints(str(copy / "checkpoints"), lines.append).restore_newest(into)
    assert notes["step"] == 6
    assert len(lines) == 1 and "step-00000008 is damaged" in lines[0] and "falling back to step 6" in lines[0]
    want = variables(run)
    Checkpoints(str(run / "model/checkpoints")).restore(want, 6)
    for name, variable in into.items():
        np.testing.assert_array_equal(variable.numpy(), want[name].numpy())


@pytest.mark.parametrize("name", ["betas=[0.9,0.95]", "a*b?", "back\\slash"])
def test_a_folder_whose_name_has_the_characters_of_globs_keeps_checkpoints_that_can_be_read(tmp_path, name):
    checkpoints = Checkpoints(str(tmp_path / name))
    checkpoints.save(kept({"a": 1, "b": 2}), {"step": 1})
    into = kept({"a": 0, "b": 0})
    checkpoints.restore(into, 1)
    assert [into[key].numpy()[0, 0] for key in "ab"] == [1, 2]


def test_a_checkpoint_without_a_marker_does_not_count(run, copy):
    (newest(copy) / MARKER).unlink()
    checkpoints = Checkpoints(str(copy / "checkpoints"))
    assert checkpoints.steps() == [2, 4, 6]
    assert checkpoints.restore_newest(variables(run))["step"] == 6


@pytest.mark.full
@pytest.mark.parametrize("damage", [truncated_data, unreadable_marker])
def test_a_run_whose_newest_checkpoint_is_damaged_makes_it_again(run, copy, damage):
    damage(newest(copy))
    shown = runs.in_child(runs.train, str(run / "config.yaml"), copy)
    assert "step-00000008 is damaged" in shown and "going on from step 6" in shown
    assert runs.losses(copy) == runs.losses(run / "model")
    assert runs.bits(runs.state(copy)) == runs.bits(runs.state(run / "model"))
    assert Checkpoints(str(copy / "checkpoints")).restore_newest(variables(run))["step"] == 8


def test_when_no_checkpoint_can_be_read_one_error_says_so_and_nothing_is_deleted(run, copy):
    into = variables(run)
    for folder in (copy / "checkpoints").glob("step-*"):
        garbage_index(folder)
    with pytest.raises(ValueError, match="none of the 4 checkpoints in .*/checkpoints can be read"):
        Checkpoints(str(copy / "checkpoints")).restore_newest(into)
    assert Checkpoints(str(copy / "checkpoints")).steps() == [2, 4, 6, 8]


def test_an_unreadable_marker_of_an_old_checkpoint_stops_neither_saving_nor_the_choice_of_the_best(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    for step in (1, 2):
        checkpoints.save(kept({"w": step}), {"step": step, "loss": float(step)})
    (tmp_path / f"step-00000001/{MARKER}").write_text("{")
    assert checkpoints.best() == 2
    checkpoints.save(kept({"w": 3}), {"step": 3})
    checkpoints.prune(1)
    assert 3 in checkpoints.steps()


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    for step, loss in enumerate([3.0, 1.0, None, 2.0, 1.5, 4.0], 1):
        checkpoints.save(kept({"w": step}), {"step": step} | ({} if loss is None else {"loss": loss}))
        checkpoints.prune(2)
    assert checkpoints.best() == 2
    assert checkpoints.steps() == [2, 5, 6]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (2, 5, 6)]


def test_what_a_killed_process_left_of_an_old_checkpoint_is_deleted_too(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    for step in (1, 2):
        checkpoints.save(kept({"w": step}), {"step": step})
    (tmp_path / f"step-00000001/{MARKER}").unlink()  # by a prune that was killed
    checkpoints.save(kept({"w": 3}), {"step": 3})
    checkpoints.prune(2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_notes_of_an_evaluation_are_added_to_a_checkpoint_that_is_there(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(kept({"w": 1}), {"step": 1, "position": 4})
    checkpoints.note(1, {"loss": 0.5})
    assert checkpoints.notes(1) == {"step": 1, "position": 4, "variables": 1, "loss": 0.5}


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_variable(run, copy):
    into = variables(run)
    name = next(name for name in into if name.endswith("embeddings"))
    into[name] = tf.Variable(tf.zeros([1, 2, 3]))
    with pytest.raises(ValueError, match=r"embeddings needs shape \[1, 2, 3\], got \[100, 16\]"):
        Checkpoints(str(copy / "checkpoints")).restore_newest(into)


def test_a_variable_that_the_file_lacks_is_an_error_that_names_it_and_assigns_nothing(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(kept({"model/a": 1}), {"step": 1})
    into = kept({"model/a": 0, "model/b": 0})
    with pytest.raises(ValueError, match=r"step-00000001 is of another model: it has no .*b \(1 variable"):
        checkpoints.restore_newest(into)
    assert not into["model/a"].numpy().any()


def test_every_trainable_weight_and_both_slots_of_it_are_in_a_checkpoint(run):
    stored, needed = runs.state(run / "model", 8), variables(run)
    assert len([name for name in stored if "save_counter" not in name]) == len(needed)
    weights = {name for name in needed if name.startswith("masked_lm/")}
    assert set(needed) - weights == {f"{slot}/{name}" for slot in "mv" for name in weights}
    for part in ("embedding", "mixer_0", "final_norm", "output_bias"):
        assert any(part in name for name in weights)


@pytest.mark.full
def test_a_weight_that_is_not_trained_stays_as_it_began_and_comes_back_from_the_checkpoint(tmp_path, monkeypatch):
    runs.corpus(tmp_path)
    mixer = {"type": "linear_attention", "heads": 2, "features": "favor"}
    path = runs.write(tmp_path, model={"type": "causal_lm", "depth": 1, "mixer": mixer}, train={"steps": 2})
    runs.in_child(runs.train, path, tmp_path / "model")
    drawn = np.float32(random_features.orthogonal_normal(128, 8))
    kept = {name: x for name, x in runs.state(tmp_path / "model").items() if "directions" in name}
    assert [x.tobytes() for x in kept.values()] == [drawn.tobytes()]  # it has no slots
    monkeypatch.setattr(random_features, "orthogonal_normal", lambda *shape: np.ones(shape))  # as from another NumPy
    run = restore(str(tmp_path / "model"))
    assert run.step == 2 and np.array_equal(run.model.mixers[0].favor.directions.numpy(), drawn)


def test_a_damaged_best_checkpoint_falls_back_to_the_newest_good_one_and_says_so(copy):
    checkpoints = Checkpoints(str(copy / "checkpoints"))
    checkpoints.note(4, {"loss": 0.5})
    assert said(copy) == (4, [])
    missing_data(copy / "checkpoints/step-00000004")
    a_value_that_is_no_number(newest(copy))
    step, (best, last) = said(copy)
    assert step == 6
    assert "step-00000004 is damaged: " in best and best.endswith("; falling back to step 8")
    assert last.endswith("step-00000008 is damaged: masked_lm/output_bias is not finite; falling back to step 6")
    with pytest.warns(UserWarning, match="falling back to step 6"):
        ft.load(str(copy))


def test_checkpoints_that_the_run_removes_while_they_are_read_give_way_to_newer_ones(copy, monkeypatch):
    restored, folder = Checkpoints.restore, copy / "checkpoints"

    def removing(self, variables, step):
        """First, the run has saved a newer one and removed the one that is wanted."""
        monkeypatch.setattr(Checkpoints, "restore", restored)
        wanted = folder / f"step-{step:08d}"
        shutil.copytree(wanted, folder / f"step-{step + 1:08d}")
        self._mark(step + 1, {**self.notes(step), "step": step + 1})
        shutil.rmtree(wanted)
        return self.restore(variables, step)

    monkeypatch.setattr(Checkpoints, "restore", removing)
    assert said(copy, checkpoint="newest") == (9, [])
    monkeypatch.setattr(Checkpoints, "restore", removing)
    with pytest.raises(ValueError, match="step-00000004 was removed while it was read: its run goes on"):
        said(copy, checkpoint=4)


def test_a_checkpoint_is_taken_by_its_step_and_no_other_in_its_place(copy):
    assert said(copy, checkpoint=4) == (4, [])
    with pytest.raises(ValueError, match=r"model/checkpoints has no checkpoint of step 5, it has 2, 4, 6, 8"):
        said(copy, checkpoint=5)
    a_value_that_is_no_number(copy / "checkpoints/step-00000004")
    with pytest.raises(ValueError, match=r"step-00000004 is damaged: masked_lm/output_bias is not finite$"):
        said(copy, checkpoint=4)


def test_another_tokenizer_of_the_same_size_is_refused_by_its_name(run, copy):
    text = (run / "train.txt").read_text().split("\n")[:60]
    other = Tokenizer.train(iter(text), runs.VOCABULARY)
    assert other.vocabulary_size == Tokenizer.load(str(copy / "tokenizer.model")).vocabulary_size
    other.save(str(copy / "tokenizer.model"))
    for reads in (lambda: restore(str(copy)), lambda: runs.opened(str(run / "config.yaml"), copy)):
        with pytest.raises(ValueError, match=r"model/tokenizer.model is another tokenizer than the run was trained"):
            reads()


def test_a_checkpoint_that_holds_more_than_the_model_is_refused_by_the_name_of_a_variable(tmp_path, copy):
    checkpoints = Checkpoints(str(tmp_path / "other"))
    checkpoints.save(kept({"model/a": 1, "model/b": 1, "m/model/a": 1}), {"step": 1})
    with pytest.raises(ValueError, match=r"step-00000001 is of another model: it has model/b, .* \(1 variable"):
        checkpoints.restore_newest(kept({"model/a": 0}))
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("model:\n", "model:\n  head_bias: false\n"))
    with pytest.raises(ValueError, match=r"it has masked_lm/output_bias, which the config's model lacks"):
        restore(str(copy))


def test_what_is_not_finite_is_not_saved_and_the_last_good_checkpoint_is_the_one_that_was_read(run, copy):
    a_value_that_is_no_number(newest(copy))
    before = sorted(path.name for path in (copy / "checkpoints").iterdir())
    opened, _ = runs.opened(str(run / "config.yaml"), copy)
    name, variable = next((name, v) for name, v in opened.variables.items() if name.startswith("v/"))
    variable.assign(tf.fill(variable.shape, np.float32(np.inf)))
    opened.step.assign(7)
    with pytest.raises(ValueError, match=f"{name} is not finite after step 7; the last good checkpoint is of step 6"):
        opened.save()
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == before


def test_a_damaged_newer_checkpoint_that_is_set_aside_does_not_count_among_the_ones_to_keep(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    for step in (1, 9):
        checkpoints.save(kept({"w": step}), {"step": step})
    checkpoints.set_aside(after=1)  # the run fell back from step 9
    checkpoints.save(kept({"w": 2}), {"step": 2})
    checkpoints.prune(1)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-00000002", "step-00000009.1"]


def test_a_loss_that_is_no_number_makes_no_checkpoint_the_best(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    for step, loss in enumerate([float("nan"), 2.0, float("-inf")], 1):
        checkpoints.save(kept({"w": step}), {"step": step, "loss": loss})
    assert checkpoints.best() == 2


def test_the_average_of_the_last_checkpoints_is_a_model_directory_that_can_be_read_and_not_trained_on(run, copy):
    out, model_dir = str(copy / "average"), str(copy)
    assert average(model_dir, 3, out, pytest.fail) == [8, 6, 4]
    found, each = restore(out, pytest.fail), [restore(model_dir, checkpoint=step) for step in (4, 6, 8)]
    for got, *one in zip(found.model.weights, *(trained.model.weights for trained in each), strict=True):
        want = np.mean([v.numpy().astype(np.float64) for v in one], axis=0).astype(np.float32)
        np.testing.assert_array_equal(got.numpy(), want)
        assert np.ptp([v.numpy() for v in one], axis=0).any()
    assert found.step == 8 and loop.evaluate(out, runs.Lines())["step"] == 8
    assert average(model_dir, 1, out, pytest.fail) == [8]  # over the older one: evaluation left nothing in it
    moved = copy.rename(copy.with_name("moved"))
    assert loop.evaluate(str(moved / "average"), runs.Lines())["step"] == 8
    assert not copy.exists() and average(str(moved), 1, str(moved / "average"), pytest.fail) == [8]
    alone = moved.rename(copy) / "average"
    shutil.copytree(alone, copy.with_name("alone"))
    shutil.rmtree(copy / "tokens")
    assert loop.evaluate(str(copy.with_name("alone")), runs.Lines())["step"] == 8 and not (copy / "tokens").exists()
    with pytest.raises(
        ValueError, match="holds weights and no optimizer's state: start a new run from it with init_from"
    ):
        runs.opened(str(run / "config.yaml"), out)


def test_an_average_leaves_damaged_checkpoints_out_and_overwrites_nothing_of_others(copy, tmp_path):
    a_value_that_is_no_number(newest(copy))
    lines = []
    assert average(str(copy), 2, str(tmp_path / "out"), lines.append) == [6, 4]
    assert len(lines) == 1 and lines[0].endswith("masked_lm/output_bias is not finite; leaving it out")
    with pytest.raises(ValueError, match="has 3 good checkpoints to average, --last asks for 4"):
        average(str(copy), 4, str(tmp_path / "out"), lines.append)
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="notes.txt, which flash-tf average did not write"):
        average(str(copy), 2, str(tmp_path / "out"), lines.append)
    with pytest.raises(ValueError, match="--last must be 1 or more, got 0"):
        average(str(copy), 0, str(tmp_path / "new"), lines.append)


def test_an_average_is_of_the_newest_and_not_of_an_older_best(copy, tmp_path):
    file = copy / "config.yaml"
    file.write_text(re.sub(r"\bkeep: \d+", "keep: 2", file.read_text()))
    with pytest.raises(ValueError, match="has 2 good checkpoints to average, --last asks for 3"):
        average(str(copy), 3, str(tmp_path / "out"), pytest.fail)
    assert average(str(copy), 2, str(tmp_path / "out"), pytest.fail) == [8, 6]


@pytest.mark.parametrize("strategy", ["one_device", pytest.param("jax", marks=pytest.mark.full)])
def test_checkpoints_are_of_the_steps_that_the_config_says_however_long_the_loops(tmp_path, strategy):
    runs.corpus(tmp_path)
    train = {"steps": 17, "steps_per_loop": 6, "checkpoint_every": 5, "keep": 9}
    path = runs.write(tmp_path, model=runs.SMALLEST, train=train, evaluation={"every": 8})
    if strategy == "jax":
        assert jax_child.train(
            [path, str(tmp_path / "model"), ["strategy.type=jax", "train.jit_compile=auto"], None]
        ) == [""]
    else:
        runs.train(path, tmp_path / "model")
    steps = [int(folder.name.removeprefix("step-")) for folder in runs.checkpoints(tmp_path / "model")]
    assert steps == [5, 8, 10, 15, 16, 17]  # an evaluation saves one too
