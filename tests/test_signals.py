"""Signals at moments when a command has nothing to save."""

import os
import signal
import types

import pytest

from flash_tf import cli
from flash_tf.commands import describe
from flash_tf.training import actions
from tests.training import runs


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
    before = [signal.getsignal(n) for n in cli.ENDING]
    assert cli.main(["describe", "quickstart"]) == 128 + number
    assert capfd.readouterr().err == f"flash-tf: stopped by {signal.Signals(number).name}\n"
    assert [signal.getsignal(n) for n in cli.ENDING] == before


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
