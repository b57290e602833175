"""Signals at moments when a command has nothing to save."""

import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from flash_tf import cli
from flash_tf.commands import describe
from flash_tf.training import actions
from flash_tf.training.trainer import Trainer
from tests.training import runs

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("swallowed", [False, True], ids=["alone", "inside a library"])
def test_a_signal_ends_a_command_with_a_line_and_128_plus_its_number(number, swallowed, monkeypatch, capfd):
    def run(args, log):
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            if swallowed:
                raise RuntimeError("INTERNAL: an iterator failed") from None
            raise

    monkeypatch.setattr(describe, "run", run)
    given = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as these tests may run under nohup
    before = [signal.getsignal(n) for n in cli.ENDING]
    try:
        assert cli.main(["describe", "quickstart"]) == 128 + number
        assert capfd.readouterr().err == f"flash-tf: stopped by {signal.Signals(number).name}\n"
        assert [signal.getsignal(n) for n in cli.ENDING] == before
    finally:
        signal.signal(signal.SIGHUP, given)


SWALLOWED = """
try:
    os.kill(os.getpid(), {number})
    time.sleep(1)
except BaseException:
    pass
"""
NEVER_ENDING = {
    "importing": "import never",
    "in a library that swallows the error": f"{SWALLOWED}\ntime.sleep(60)",
    "in C": "threading.Timer(0.2, os.kill, (os.getpid(), {number})).start()\n"
    "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",
}


@pytest.mark.parametrize("where", NEVER_ENDING)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_that_would_go_on_all_the_same(number, where, tmp_path):
    imports = "import hashlib, os, sys, threading, time\n"
    (tmp_path / "never.py").write_text(imports + SWALLOWED.format(number=int(number)) + "time.sleep(60)\n")
    (tmp_path / "work.py").write_text(NEVER_ENDING[where].format(number=int(number)))
    command = [
        "from flash_tf import cli",
        "from flash_tf.commands import describe",
        "cli.GRACE = 0.5",
        "describe.run = lambda args, log: exec(open('work.py').read())",
        "sys.exit(cli.main(['describe', 'quickstart']))",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "TMPDIR": str(tmp_path)}
    called = [sys.executable, "-c", imports + "\n".join(command)]
    done = subprocess.run(called, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == f"flash-tf: stopped by {signal.Signals(number).name}\n"
    assert not list(tmp_path.glob("*.log"))


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(describe, "run", lambda args, log: os.kill(os.getpid(), signal.SIGHUP))
        assert cli.main(["describe", "quickstart"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_during_training_goes_to_whoever_listened_before():
    heard, stopped = [], []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    trainer, shown = types.SimpleNamespace(reading=True), runs.Lines()
    try:
        with actions.Signals(pytest.fail, lambda: stopped.append(True), trainer, shown):
            signal.raise_signal(signal.SIGTERM)
            assert not heard
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM] and stopped


def test_a_run_outside_the_main_thread_hears_no_signals_and_goes_on():
    trained, before = [], signal.getsignal(signal.SIGTERM)

    def run():
        with actions.Signals(pytest.fail, pytest.fail, types.SimpleNamespace(), runs.Lines()):
            trained.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert trained == [before]


def test_a_loop_between_two_looks_at_signals_lasts_four_seconds_or_one_step():
    length = lambda seconds: Trainer.steps_per_loop.fget(types.SimpleNamespace(_seconds=seconds, _most=100))  # noqa: E731
    assert [length(seconds) for seconds in (None, 30.0, 1.5, 0.5, 0.001)] == [1, 1, 2, 8, 100]
