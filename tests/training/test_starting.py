"""New runs that start from the weights of another one."""

import shutil

import pytest
import tensorflow as tf

from flash_tf import config
from flash_tf.compiling import artifact, tuning
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training.restore import restore
from tests.training import runs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("source")
    runs.corpus(folder)
    path = runs.write(folder, model={"depth": 1}, train={"steps": 4})
    runs.in_child(runs.train, path, folder / "model")
    return folder


def opened(source, folder, *overrides, start="model"):
    """A new run, opened by the source's config, and the lines that it shows."""
    run, _ = runs.opened(str(source / "config.yaml"), folder, f"init_from={source / start}", *overrides)
    return run, run.progress.shown()


def numbers(model, without=()):
    weights = {v.path.partition("/")[2]: v.numpy() for v in model.weights}
    return runs.bits({name: x for name, x in weights.items() if name not in without})


def test_a_run_starts_from_the_weights_and_the_tokenizer_of_a_run_or_preset_with_a_fresh_optimizer(source, tmp_path):
    trained = restore(str(source / "model"))
    trained.model.save_to_preset(str(source / "preset"))
    for start in ("model", "preset"):
        run, shown = opened(source, tmp_path / start, "train.seed=5", start=start)
        assert f"starting from {source / start}: {len(trained.model.weights)} weights loaded\n" in shown
        assert "training a tokenizer" not in shown
        assert numbers(run.model) == numbers(trained.model)
        assert int(run.step.numpy()) == 0 and run.saved is None
        assert not any(v.numpy().any() for v in run.optimizer.state().values())
        assert (tmp_path / start / "tokenizer.model").read_bytes() == (source / "model/tokenizer.model").read_bytes()


def test_a_run_starts_from_a_model_with_another_head_and_says_so(source, tmp_path):
    run, shown = opened(source, tmp_path / "new", "model.type=causal_lm", "model.head_bias=false")
    assert numbers(run.model) == numbers(restore(str(source / "model")).model, without=["output_bias"])
    assert "weights loaded; left behind: output_bias\n" in shown


def test_a_run_that_has_a_checkpoint_goes_on_from_it_and_does_not_start_again(source, tmp_path):
    shutil.copytree(source / "model", tmp_path / "start")
    path, option = str(source / "config.yaml"), f"init_from={tmp_path / 'start'}"
    run, _ = runs.opened(path, tmp_path / "new", option)
    for variable in run.weights.values():
        variable.assign(tf.zeros_like(variable))
    run.step.assign(1)
    run.save()
    shutil.rmtree(tmp_path / "start")
    run, _ = runs.opened(path, tmp_path / "new", option)
    assert int(run.step.numpy()) == 1 and not any(v.numpy().any() for v in run.weights.values())


def test_a_start_that_cannot_be_used_is_refused_before_anything_is_written(source, tmp_path):
    refused = {
        ("model.width=32",): r"init_from .*/model: a MaskedLM cannot start .*embeddings needs shape \(100, 32\)",
        ("init_from=none",): r"init_from needs a run or a preset: none is not a model directory",
    }
    for overrides, said in refused.items():
        with pytest.raises(ValueError, match=said):
            opened(source, tmp_path / "new", *overrides)
    text = (source / "train.txt").read_text().split("\n")[:60]
    Tokenizer.train(iter(text), runs.VOCABULARY).save(str(tmp_path / "other.model"))
    with pytest.raises(ValueError, match=r"init_from .*/model has another tokenizer than data.tokenizer .*other.model"):
        opened(source, tmp_path / "new", f"data.tokenizer={tmp_path / 'other.model'}")
    assert not (tmp_path / "new/checkpoints").exists()


def test_an_exported_step_refuses_a_start_and_block_sizes_are_timed_without_it(source):
    experiment = config.load(str(source / "config.yaml"), ["init_from=runs/other"])
    with pytest.raises(ValueError, match="an exported step starts from new weights: init_from needs `flash-tf train`"):
        artifact.resolve(experiment)
    assert tuning._with(experiment, "chunk_size", 8).init_from is None
