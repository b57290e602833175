"""New runs that start from the weights of another one, and runs that go on for more steps than they planned."""

import argparse
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf

from flash_tf import config
from flash_tf.commands import train
from flash_tf.compiling import artifact, tuning
from flash_tf.data.tokenizer import Tokenizer
from flash_tf.training import run_directory, schedule
from flash_tf.training.extend import extended
from flash_tf.training.restore import restore
from tests.training import runs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("source")
    runs.corpus(folder)
    optimizer = {"schedule": "inverse_sqrt"}  # whose rates do not depend on the number of steps
    path = runs.write(folder, model=runs.SMALLEST, optimizer=optimizer, train={"steps": 4})
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


def command(*words):
    """What `flash-tf train` does with these words, in this process."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    train.run(parser.parse_args([str(word) for word in words]), types.SimpleNamespace(progress=runs.Lines))


@pytest.mark.full
def test_a_run_that_is_extended_equals_one_that_was_planned_with_all_steps(source, tmp_path):
    shutil.copytree(source / "model", tmp_path / "model")
    whole = runs.start(runs.train, str(source / "config.yaml"), tmp_path / "whole", "train.steps=8")
    status, out, err = runs.command(tmp_path, "train", tmp_path / "model", "--extend", 8)
    assert (status, out) == (0, "")
    assert "8 steps instead of 4; the learning rate is " in err and "going on from step 4" in err
    runs.finish(whole)
    for same in (
        runs.losses,
        lambda run: runs.records(run, "evaluations.jsonl"),
        lambda run: runs.bits(runs.state(run)),
    ):
        assert same(tmp_path / "model") == same(tmp_path / "whole")
    assert run_directory.load_config(str(tmp_path / "model")) == run_directory.load_config(str(tmp_path / "whole"))
    with pytest.raises(
        ValueError, match=r"holds a run with train.steps = 8, this one has 4; .*`flash-tf train .*/model`"
    ):
        runs.opened(str(source / "config.yaml"), tmp_path / "model")
    run, _ = runs.opened(str(tmp_path / "model/config.yaml"), tmp_path / "model")
    assert int(run.step.numpy()) == 8


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_an_extended_schedule_is_the_planned_one_or_stays_as_it_is(source, name):
    options = [f"optimizer.schedule={name}", "optimizer.warmup_steps=1"]
    short = config.load(str(source / "config.yaml"), options)
    rates = lambda of: [  # noqa: E731
        float(schedule.learning_rate(of.optimizer, of.train.steps, np.float32(done), np))
        for done in range(of.train.steps)
    ]
    said = []
    planned = extended(short, str(source / "model"), 10, False, said.append)
    assert planned == config.load(str(source / "config.yaml"), [*options, "train.steps=10"])
    constant = extended(short, str(source / "model"), 10, True, said.append)
    assert rates(constant) == rates(short) + [rates(short)[-1]] * 6
    assert [line.split("rate is ")[1] for line in said] == [
        f"{rates(one)[4]:.2e}, after {rates(short)[3]:.2e}" for one in (planned, constant)
    ]
    # The same command again changes nothing, and says nothing.
    for again, stays in ((planned, False), (constant, True)):
        assert extended(again, str(source / "model"), 10, stays, said.append) == again and len(said) == 2
    longer = extended(constant, str(source / "model"), 12, False, said.append)
    assert rates(longer) == rates(constant) + [rates(short)[-1]] * 2


def test_what_cannot_be_extended_is_refused(source, tmp_path):
    refused = {
        (source / "model", "--extend", 3): r"--extend needs the steps of the whole run, 4 or more, got 3",
        (source / "config.yaml", "--extend", 9): r"--extend needs the folder of a run, got .*config.yaml",
        (source / "model", "--schedule", "constant"): r"--schedule is for --extend",
        (source / "model", "--model-dir", tmp_path): r"model is a run, which stays in its folder",
    }
    for words, said in refused.items():
        with pytest.raises(ValueError, match=said):
            command(*words)
    shutil.copy(source / "model/config.yaml", tmp_path)
    with pytest.raises(ValueError, match="has no checkpoint to go on from"):
        command(tmp_path, "--extend", 9)
