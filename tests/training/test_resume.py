"""A run that was stopped or killed ends in the same bits as a run without a stop."""

import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import keras
import pytest
import tensorflow as tf
from etils import epath

from flash_tf import config
from flash_tf.data import stored, token_cache
from flash_tf.training import loop, run_directory
from flash_tf.training.actions import Interrupted
from flash_tf.training.owner import Owner
from flash_tf.training.run import Run
from tests.training import runs

PATH = type(epath.Path("."))
CAUSAL = {"model": {"type": "causal_lm"}, "data": {"packing": "documents"}}


@pytest.mark.parametrize(
    "sections", [pytest.param({}, id="masked", marks=pytest.mark.full), pytest.param(CAUSAL, id="causal")]
)
def test_steps_after_a_resume_equal_those_of_a_run_without_a_stop(tmp_path, sections):
    runs.corpus(tmp_path)
    model = {"depth": 1, **sections.get("model", {}), "dropout": 0.1}
    path = runs.write(tmp_path, **{**sections, "model": model})
    whole = runs.start(runs.train, path, tmp_path / "whole")
    runs.in_child(runs.train, path, tmp_path / "halves", stop_after=4)
    assert len(runs.losses(tmp_path / "halves")) == 4
    assert "going on from step 4" in runs.in_child(runs.train, path, tmp_path / "halves")
    runs.finish(whole)
    assert len(runs.losses(tmp_path / "whole")) == 8
    runs.same(tmp_path / "whole", tmp_path / "halves")


def test_a_run_that_goes_on_draws_no_weights_before_it_reads_them(tmp_path, monkeypatch):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model={"type": "causal_lm", **runs.SMALLEST})
    run, _ = runs.opened(path, tmp_path / "run")
    run.save()
    saved = run.values
    monkeypatch.setattr(keras.initializers.RandomNormal, "__call__", None)
    again, _ = runs.opened(path, tmp_path / "run")
    found = again.values
    assert all((saved[name] == found[name]).all() for name in saved) and saved.keys() == found.keys()
    with pytest.raises(TypeError):
        runs.opened(path, tmp_path / "new")


def in_loops(path, folder, lengths):
    """The records of a run, and its weights, after loops of these lengths."""
    run, trainer = runs.opened(path, folder, "train.steps_per_loop=4", "train.jit_compile=true")
    records, read, traces = [], trainer._read, trainer._run.experimental_get_tracing_count
    trainer._read = lambda *arguments: read(*arguments) if traces() == 1 else pytest.fail("compiled after reading")
    for length in lengths:
        trainer.train(tf.constant(length))
        records += trainer.history.tolist()
    assert int(run.step.numpy()) == len(records)
    assert traces() == 1  # a loop of no steps has the shapes of the others
    return records, {name: v.numpy().tobytes() for name, v in run.variables.items()}


def both(path, folder):
    return in_loops(path, f"{folder}/one", [4, 2]), in_loops(path, f"{folder}/other", [1, 2, 3])


def test_the_lengths_of_loops_change_no_bit_of_a_run_that_xla_compiles(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model={"type": "causal_lm", **runs.SMALLEST, "dropout": 0.1})
    one, other = runs.in_child(both, path, str(tmp_path))
    assert one == other
    assert len({tuple(record) for record in one[0]}) == 6


@pytest.mark.full
def test_a_signal_during_tokenizing_ends_the_run_at_once_and_the_same_command_goes_on(tmp_path, monkeypatch):
    runs.corpus(tmp_path)
    path, batches = runs.write(tmp_path, model=runs.SMALLEST), token_cache.text_batches

    def endless(documents):
        while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # the run has not begun to listen
            time.sleep(0.01)
            yield ["some words"]
        os.kill(os.getpid(), signal.SIGTERM)
        yield from itertools.repeat(["some words"])

    monkeypatch.setattr(token_cache, "text_batches", endless)
    shown = runs.train(path, tmp_path / "run")
    assert "SIGTERM: saving after this loop of steps" in shown and "step 1/" not in shown
    assert not list((tmp_path / "run/tokens").rglob("*.partial"))
    monkeypatch.setattr(token_cache, "text_batches", batches)
    assert "step 8/8" in runs.train(path, tmp_path / "run")


@pytest.mark.full
def test_a_signal_during_an_evaluation_saves_its_step_and_the_same_command_evaluates_it(tmp_path, monkeypatch):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(runs.Lines, "evaluated", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
        shown = runs.train(path, tmp_path / "run")
    assert "validation loss" not in shown
    steps = len(runs.losses(tmp_path / "run"))
    assert max(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == f"step-{steps:08d}"
    shown = runs.train(path, tmp_path / "run")
    assert f"going on from step {steps}" in shown and f"step {steps}  validation loss" in shown


@pytest.mark.full
def test_an_error_of_an_evaluation_loses_no_step(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model=runs.SMALLEST, train={"checkpoint_every": 100})
    text = (tmp_path / "validation.txt").read_bytes()
    (tmp_path / "validation.txt").write_bytes(text[:-3] + b"\xff" + text[-2:])  # of one size: the same text, mended
    with pytest.raises(ValueError, match="validation.txt needs UTF-8 text, got byte 0xff"):
        runs.train(path, tmp_path / "run")
    (tmp_path / "validation.txt").write_bytes(text)
    shown = runs.train(path, tmp_path / "run")
    assert "going on from step 4" in shown and "step 4  validation loss" in shown


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def half(call, args):
    """Writes the first half of the data to disk."""
    call(*args[:-1], args[-1][: len(args[-1]) // 2])
    args[0].flush()
    kill()


def begun(call, args):
    """Writes the first half of a whole file."""
    call(*args[:-1], args[-1][: len(args[-1]) // 2])
    kill()


def torn(call, args):
    """Writes a part of some records."""
    records, lines = args
    with open(records._path, "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines)[:-20])
    kill()


def before(call, args):
    kill()


def after(call, args):
    call(*args)
    kill()


def within(call, args):
    """Dies some milliseconds later. The delay differs by process, within the time of a step or a write."""
    threading.Timer(random.Random(os.getpid()).uniform(0, 0.004), kill).start()
    return call(*args)


# The place where a run dies, how it dies, and at which visit of the place: between the two numbers.
EARLY = [
    (Owner, "_write", before, 1, 1),
    (PATH, "write_bytes", begun, 1, 1),  # the tokenizer
    (stored, "write", before, 1, 4),  # the claim, the fingerprint, the config, the versions
    (token_cache, "write_whole", half, 1, 2),
    (token_cache, "write_whole", half, 3, 5),
    (os, "replace", before, 1, 3),  # token files
]
LATE = [
    *[(runs.Lines, "status", after, 4, 6)] * 3,  # tokenized shards are two, then the start; then between loops of steps
    *[(runs.Lines, "status", within, 4, 6)] * 2,  # in the next loop
    (tf.train.Checkpoint, "write", before, 1, 2),
    *[(tf.train.Checkpoint, "write", within, 1, 2)] * 3,
    (tf.train.Checkpoint, "write", after, 1, 2),  # whole, but without a marker
    (stored, "write", before, 4, 5),  # a marker
    *[(run_directory.Records, "append", torn, 1, 3)] * 2,
    (PATH, "rmtree", before, 1, 2),  # an old checkpoint, whose marker is gone
]


def die(path, model_dir, kind, place, occasion):
    """Trains until the process comes to a place for the `occasion`-th time, and dies there."""
    owner, name, how, *_ = (EARLY, LATE)[kind][place]
    call, times = getattr(owner, name), itertools.count(1)

    def watched(*args, **kwargs):
        given = functools.partial(call, **kwargs)
        return how(given, args) if next(times) == occasion else given(*args)

    setattr(owner, name, watched)
    runs.train(path, model_dir)


@pytest.mark.full
def test_a_run_that_is_killed_twenty_times_equals_one_that_is_not(tmp_path):
    runs.corpus(tmp_path)
    train = {"steps": 60, "keep": 1}
    path = runs.write(tmp_path, model={"depth": 1, "dropout": 0.1}, train=train, evaluation={"every": 32})
    whole = runs.start(runs.train, path, tmp_path / "whole")
    draw = random.Random(3)
    places = [(0, place) for place in range(len(EARLY))]
    places += [(1, place) for place in draw.sample(range(len(LATE)), len(LATE))]
    assert len(places) == 20
    for kind, place in places:
        occasion = draw.randint(*(EARLY, LATE)[kind][place][3:])
        process, _ = started = runs.start(die, path, tmp_path / "killed", kind, place, occasion)
        assert runs.finish(started) is None
        assert process.exitcode == -signal.SIGKILL, (EARLY, LATE)[kind][place]
    assert "going on from step" in runs.in_child(runs.train, path, tmp_path / "killed")
    runs.finish(whole)
    assert len(runs.losses(tmp_path / "whole")) == 60
    runs.same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.full
def test_deterministic_operators_give_the_losses_of_the_others_on_a_cpu(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model={"depth": 1}, train={"steps": 6, "steps_per_loop": 3})
    for name in ("false", "true"):
        done = runs.command(
            tmp_path, "train", path, "--model-dir", tmp_path / name, "--set", f"train.deterministic={name}"
        )
        assert done[0] == 0, done
    assert runs.losses(tmp_path / "true") == runs.losses(tmp_path / "false")


@pytest.mark.full
def test_deterministic_programs_leave_products_to_cublas(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model={"depth": 1}, train={"steps": 1, "jit_compile": True, "deterministic": True})
    program = "from flash_tf.cli import program; program()"
    given = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path / 'xla'}"}  # which a child of the fork server has not
    subprocess.run(
        [sys.executable, "-c", program, "train", path, "--model-dir", tmp_path / "run"], env=given, check=True
    )
    options = [file.read_text() for file in (tmp_path / "xla").glob("*.debug_options")]
    assert options
    for text in options:
        assert "xla_gpu_deterministic_ops: true" in text and "xla_gpu_enable_triton_gemm: false" in text


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_first_try_that_a_signal_or_an_error_ends_leaves_its_folder_free(error, tmp_path):
    runs.corpus(tmp_path)
    path, folder = runs.write(tmp_path), str(tmp_path / "run")
    for rate in (0.01, 0.02):
        experiment = config.load(path, [f"optimizer.learning_rate={rate}"])
        run_directory.claim(folder, experiment)
        with pytest.raises(error), run_directory.begun(folder, experiment, "a tokenizer"):
            raise error


@pytest.mark.full
def test_a_signal_during_the_last_save_ends_the_command_after_it(tmp_path, monkeypatch):
    runs.corpus(tmp_path)
    save, sent = Run.save, []

    def slow(run):
        if run.evaluation.get("step") == 8 and not sent:
            sent.append(signal.raise_signal(signal.SIGTERM))
        save(run)

    monkeypatch.setattr(Run, "save", slow)
    with pytest.raises(Interrupted):
        loop.train(config.load(runs.write(tmp_path)), str(tmp_path / "run"), runs.Lines())
    assert runs.checkpoints(tmp_path / "run")[-1].name == "step-00000008"
