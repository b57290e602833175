"""One process at a time writes a model directory, on a disk and in a bucket."""

import errno
import fcntl
import json
import os
import re
import signal
import threading

import pytest
import tensorflow as tf
from etils import epath
from etils.epath import gpath

from flash_tf.training.owner import BEAT, OWNER, STALE, Owner
from tests.training import runs
from tests.training.test_bad_input import contents, one_line

OTHER = {"host": "elsewhere", "pid": 12, "since": "2026-01-01 00:00:00 +0000", "alive": "2026-01-01 00:00:00 +0000"}
HELD = r"is in use by process 12 on elsewhere \(since 2026-01-01 00:00:00 \+0000\): wait for its end"


class Clock:
    """Time that passes at once. `then` acts after so many seconds."""

    def __init__(self, then=None):
        self.seconds, self._then = 0, dict(then or {})

    def __call__(self, seconds):
        self.seconds += seconds
        for due in [due for due in self._then if due <= self.seconds]:
            self._then.pop(due)()


def write(folder, record):
    with tf.io.gfile.GFile(f"{folder}/{OWNER}", "w") as file:
        json.dump(record, file)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model directory without locks, as a bucket."""

    def no_locks(file, flags):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    return str(tmp_path)


def test_the_second_owner_is_told_who_the_first_is_and_may_come_when_the_first_has_ended(tmp_path):
    with Owner(str(tmp_path)):
        before = contents(tmp_path)
        us = rf"process {os.getpid()} on \S+ \(since 20\d\d-.*\): wait for its end, or use another --model-dir"
        with pytest.raises(ValueError, match=us), Owner(str(tmp_path)):
            pass
        assert contents(tmp_path) == before
    assert not list(tmp_path.iterdir())
    with Owner(str(tmp_path)):
        pass


def owning(folder):
    with Owner(folder):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_owner_leaves_no_lock(tmp_path):
    assert runs.in_child(owning, str(tmp_path)) is None
    assert (tmp_path / OWNER).exists()
    with Owner(str(tmp_path), wait=Clock()) as owner:
        assert owner._wait.seconds == 0


def test_an_owner_whose_lock_does_not_reach_this_host_keeps_others_out(tmp_path):
    write(tmp_path, OTHER)
    clock = Clock({15: lambda: write(tmp_path, {**OTHER, "alive": "later"})})
    with pytest.raises(ValueError, match=HELD), Owner(str(tmp_path), wait=clock):
        pass
    assert clock.seconds == 15


def test_without_locks_an_owner_that_lives_keeps_others_out(folder):
    said = []
    with Owner(folder, wait=Clock()):
        write(folder, OTHER)
        clock = Clock({BEAT: lambda: write(folder, {**OTHER, "alive": "whatever its clock says"})})
        with pytest.raises(ValueError, match=HELD), Owner(folder, said.append, clock):
            pass
    assert clock.seconds == BEAT
    assert len(said) == 1 and said[0].startswith("process 12 on elsewhere (since")


def test_without_locks_a_dead_owner_is_replaced_after_three_beats_and_not_sooner(folder):
    tf.io.gfile.makedirs(folder)
    write(folder, OTHER)
    clock = Clock()
    with Owner(folder, wait=clock):
        assert BEAT * STALE <= clock.seconds <= BEAT * STALE + 1
        with tf.io.gfile.GFile(f"{folder}/{OWNER}") as file:
            assert json.load(file)["pid"] == os.getpid()
    assert not tf.io.gfile.exists(f"{folder}/{OWNER}")


def test_without_locks_an_owner_that_ends_is_replaced_at_once(folder):
    tf.io.gfile.makedirs(folder)
    write(folder, OTHER)
    clock = Clock({7: lambda: tf.io.gfile.remove(f"{folder}/{OWNER}")})
    with Owner(folder, wait=clock):
        assert clock.seconds <= 8


def test_of_two_that_come_at_once_one_stays(folder):
    clock = Clock({1: lambda: write(folder, OTHER)})
    with pytest.raises(ValueError, match=HELD), Owner(folder, wait=clock):
        pass
    with tf.io.gfile.GFile(f"{folder}/{OWNER}") as file:
        assert json.load(file) == OTHER


def test_an_owner_renews_its_record_and_stops_when_another_took_the_directory(folder):
    with Owner(folder, wait=Clock()) as owner:
        write(folder, {**owner._name, "alive": "before"})
        owner.renew()
        with tf.io.gfile.GFile(f"{folder}/{OWNER}") as file:
            assert json.load(file)["alive"] != "before"
        owner.check()
        write(folder, OTHER)  # while this process was suspended
        owner.renew()
        with pytest.raises(ValueError, match="process 12 on elsewhere .* took .* from this process"):
            owner.check()
    with tf.io.gfile.GFile(f"{folder}/{OWNER}") as file:
        assert json.load(file) == OTHER


def in_memory(path):
    """The files of a finished run in memory, which TensorFlow reads and writes as it does gs://."""
    gpath._URI_SCHEMES |= {"ram"}
    gpath._URI_PREFIXES = (*gpath._URI_PREFIXES, "ram://")
    gpath._URI_MAP_ROOT["ram://"] = "/ram/"
    gpath._PREFIX_TO_BACKEND["ram"] = gpath.backend_lib.tf_backend
    epath.register_path_cls("ram://")(gpath.PosixGPath)
    runs.train(path, "ram://model")
    return tf.io.gfile.listdir("ram://model")


@pytest.mark.full
def test_a_run_in_a_bucket_is_owned_without_a_lock(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path, model={"depth": 1}, data={"cache": str(tmp_path / "tokens")})
    left = runs.in_child(in_memory, path)
    assert "metrics.jsonl" in left and "run.json" in left and OWNER not in left


def test_an_owner_renews_its_record_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("flash_tf.training.owner.BEAT", 0.01)
    renewed = threading.Event()
    monkeypatch.setattr(Owner, "renew", lambda self: renewed.set())
    with Owner(str(tmp_path)):
        assert renewed.wait(10)


def test_the_second_of_two_trainings_says_who_holds_the_directory_and_changes_nothing(tmp_path):
    runs.corpus(tmp_path)
    path = runs.write(tmp_path)
    with Owner(str(tmp_path / "model")):
        before = contents(tmp_path)
        line = one_line(runs.command(tmp_path, "train", path, "--model-dir", tmp_path / "model"))
        assert contents(tmp_path) == before
    assert re.search(rf"model is in use by process {os.getpid()} on \S+ \(since", line), line
