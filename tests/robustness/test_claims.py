"""A model directory belongs to the run that began in it, from its first step on."""

import os
import shutil
import signal

import pytest

from flash_tf import config
from flash_tf.data import stored
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training import modelling, run_directory
from tests.training import runs
from tests.training.test_bad_input import contents, one_line, train


def killed_while_compiling(path, model_dir):
    status = runs.Lines.status

    def watched(self, *parts, keep=False):
        status(self, *parts, keep=keep)
        if "compiling" in parts[-1]:
            os.kill(os.getpid(), signal.SIGKILL)

    runs.Lines.status = watched
    runs.train(path, model_dir)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that was killed before its first step."""
    folder = tmp_path_factory.mktemp("begun")
    runs.corpus(folder)
    path = runs.write(folder, model=runs.SMALLEST)
    assert runs.in_child(killed_while_compiling, path, folder / "model") is None
    (folder / "model/owner.json").unlink()  # the dead owner's
    return folder


@pytest.fixture
def copy(begun, tmp_path):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace(str(begun), str(tmp_path)))
    for name in ("config.yaml", "run.json"):
        there = tmp_path / "model" / name
        there.write_text(there.read_text().replace(str(begun), str(tmp_path)))
    return tmp_path


def refused(folder, *overrides):
    """The line of a command that changed nothing."""
    before = contents(folder)
    line = one_line(train(folder, *overrides))
    assert contents(folder) == before
    return line


def test_another_config_does_not_take_over_a_run_without_a_step(copy):
    line = refused(copy, "optimizer.learning_rate=0.5")
    assert f"{copy}/model holds a run with optimizer.learning_rate = 0.01, this one has 0.5; use another" in line
    assert "holds a run with evaluation.windows = None, this one has 2" in refused(copy, "evaluation.windows=2")


def test_text_that_changed_since_the_run_began_is_named(copy):
    with open(copy / "train.txt", "a") as file:
        file.write("more\n")
    assert f"holds a run with text.train = [['{copy}/train.txt', " in refused(copy)


def test_a_tokenizer_that_changed_since_the_run_began_is_named(copy):
    text = (copy / "train.txt").read_text().splitlines()[::-1][:40]
    Tokenizer.train(iter(text), runs.VOCABULARY).save(str(copy / "model/tokenizer.model"))
    assert "holds a run with tokenizer = " in refused(copy)


def test_a_run_of_a_version_without_fingerprints_is_known_by_its_config(copy):
    (copy / "model/run.json").unlink()
    (copy / "model/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    assert "holds a run with model.width = 16, this one has 32" in refused(copy, "model.width=32")
    (copy / "model/config.yaml").unlink()
    assert "has checkpoints or records but no config.yaml: use another" in refused(copy)


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.model", "versions.json", "evaluations.jsonl", "log.txt"])
def test_files_that_no_run_wrote_are_left_alone(tmp_path, name):
    runs.corpus(tmp_path)
    runs.write(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / f"model/{name}").write_text("mine\n")
    assert f"{tmp_path}/model has a {name} that no run wrote: use another --model-dir" in refused(tmp_path)
    assert (tmp_path / f"model/{name}").read_text() == "mine\n"
    assert os.listdir(tmp_path / "model") == [name]


@pytest.mark.full
def test_the_same_config_goes_on_with_what_may_change(copy):
    options = ("train.keep=1", "train.steps_per_loop=3", "evaluation.every=8", f"data.cache={copy}/tokens")
    status, _, err = train(copy, *options)
    assert status == 0, err
    assert len(runs.losses(copy / "model")) == 8
    shutil.rmtree(copy / "model/checkpoints")
    (copy / "model/metrics.jsonl").unlink()
    assert "holds a run with train.seed = 0, this one has 1" in refused(copy, "train.seed=1")


def test_another_implementation_is_the_same_run(tmp_path):
    runs.corpus(tmp_path)
    model = {"depth": 1, "mixer": {"type": "flash", "chunk_size": 8, "key_dim": 8}, "feedforward": {"type": "glu"}}
    path = runs.write(tmp_path, model=model)

    def claim(*options):
        given = str(tmp_path / "model"), config.load(path, options)
        run_directory.claim(*given)
        return given

    with run_directory.begun(*claim(), "a tokenizer"):
        (tmp_path / "model/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    claim(*(f"model.{one}mplementation=xla" for one in ("norm_i", "mixer.i", "feedforward.i")))
    with pytest.raises(ValueError, match=r"holds a run with model\.feedforward\.hidden = None, this one has 64"):
        claim("model.feedforward.hidden=64")


def killed_while_writing(path):
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    stored.write(path, b"{}")


def test_what_a_killed_process_left_of_a_file_goes_with_the_next_claim(copy):
    model_dir = copy / "model"
    for name in ("run.json", "checkpoints/step-00000002/complete.json"):
        assert runs.in_child(killed_while_writing, str(model_dir / name)) is None
    (model_dir / ".notes.partial").write_text("a user's")
    names = lambda: sorted(path.name.split(".")[1] for path in model_dir.rglob("*.partial"))  # noqa: E731
    assert names() == ["complete", "notes", "run"]
    run_directory.claim(str(model_dir), modelling.with_masking(config.load(str(copy / "config.yaml"))))
    assert names() == ["notes"]
