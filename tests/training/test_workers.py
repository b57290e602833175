"""Several processes of one run: how they find each other, stop together, and notice that one is gone."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tensorflow as tf

from flash_tf import cli
from flash_tf.training import strategy, workers
from tests.training import runs
from tests.training.test_strategies import free_ports


def start_join(addresses, index, timeout=20, lines=None):
    """Joins in a thread. Returns it, and a list that gets the error or None."""
    ended = []

    def run():
        try:
            workers.join(addresses, index, timeout, (lines if lines is not None else []).append)
        except (OSError, ValueError) as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


@pytest.fixture
def addresses():
    first, second = free_ports()
    return [f"localhost:{first}", f"localhost:{second}", "localhost:9"]


def test_workers_go_on_together_once_the_last_one_has_come(addresses):
    first = [start_join(addresses, index) for index in (1, 0)]
    time.sleep(0.3)
    assert not any(ended for _, ended in first)
    for thread, ended in [*first, start_join(addresses, 2)]:
        thread.join(10)
        assert ended == [None]


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_never_comes_is_named_now_and_then_and_at_the_end(addresses, index, monkeypatch):
    monkeypatch.setattr(workers, "REMINDER", 0.6)
    lines = []
    thread, ended = start_join(addresses, index, 1.5, lines)
    thread.join(10)
    others = [f"{i} ({addresses[i]})" for i in ((1, 2) if index == 0 else (0,))]
    assert lines[0] == f"waiting for worker {', '.join(others)}"
    assert isinstance(ended[0], TimeoutError)
    assert str(ended[0]) == f"worker {index} of 3 waited 1.5 s for worker {', '.join(others)}: not there"


@pytest.mark.parametrize(
    ("workers_", "match"),
    [
        (["localhost:70a", "localhost:1"], "needs host:port of each worker, got 'localhost:70a'"),
        (["8080", "localhost:1"], "needs host:port of each worker, got '8080'"),
        (["localhost:1", "localhost:1"], "needs a host:port of its own for each worker"),
    ],
)
def test_addresses_that_no_worker_can_have_are_refused(workers_, match):
    with pytest.raises(ValueError, match=match):
        workers.join(workers_, 1, 5, print)


def test_two_workers_with_one_index_are_refused(addresses):
    thread, ended = start_join(addresses, 0)
    with connected(int(addresses[0].split(":")[1])) as one, connected(int(addresses[0].split(":")[1])) as other:
        one.sendall(b"1\n")
        other.sendall(b"1\n")
        thread.join(10)
    assert str(ended[0]) == "two workers have strategy.index 1: each needs its own"


def test_a_worker_that_went_away_is_missing_again(addresses):
    port = int(addresses[0].split(":")[1])
    thread, ended = start_join(addresses, 0, 2)
    with connected(port) as gone:
        gone.sendall(b"1\n")
    with connected(port) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        thread.join(1)
    thread.join(10)
    assert "worker 0 of 3 waited 2 s for worker 1 " in str(ended[0])


def connected(port):
    """A connection to a server that may not listen yet."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("localhost", port))
        time.sleep(0.02)
    raise AssertionError("nobody listens")


@pytest.fixture
def linked():
    """Makes the peers of a worker, by socket pairs. Returns them and the other ends."""
    ends = []

    def link(*indices):
        ours, theirs = zip(*(socket.socketpair() for _ in indices), strict=True)
        ends.extend([*ours, *theirs])
        peers = workers.Peers(dict(zip(indices, ours, strict=True)), pytest.fail)
        peers.watch()
        return peers, theirs

    yield link
    for end in ends:
        end.close()


def failing(peers):
    """The message of a run in which TensorFlow fails."""
    with pytest.raises(ConnectionError) as raised, peers.together():
        raise tf.errors.InternalError(None, None, "{{function_node __wrapped__CollectiveBcastSend}} aborted")
    return str(raised.value)


def test_a_worker_whose_connection_ends_is_named_in_the_place_of_tensorflows_error_and_the_first_tells_who(linked):
    first, (one, other) = linked(1, 2)
    one.close()
    assert failing(first).startswith("worker 1 no longer answers: start all workers again")
    assert other.recv(64) == b"1\n"
    third, (there,) = linked(0)
    there.sendall(b"1\n")
    assert failing(third).startswith("worker 1 no longer answers")


def test_a_worker_that_has_done_its_work_is_not_lost(linked):
    peers, (there,) = linked(1)
    with peers.together():
        there.sendall(workers.DONE)
        there.shutdown(socket.SHUT_WR)
    assert there.recv(64) == workers.DONE
    assert not peers._known.wait(0.2)


def stuck(addresses, path):
    """The work of a worker that a library never gives back."""
    workers.GRACE = 0.2
    with open(path, "w", buffering=1) as lines:
        peers = workers.join(addresses, 1, 20, lambda line: lines.write(f"{line}\n"))
        peers.watch()
        with peers.together():
            threading.Event().wait(60)


def first_worker(address):
    """A first worker that lets the second one go, and is lost at once."""
    with socket.create_server(("", int(address.split(":")[1]))) as server:
        connection, _ = server.accept()
        assert connection.recv(64) == b"1\n"
        connection.sendall(workers.GO)
        connection.close()


LINE = "flash-tf: worker 0 no longer answers: start all workers again, and they go on from the newest checkpoint"


def test_a_worker_whose_library_waits_for_a_lost_one_ends_with_a_line(addresses, tmp_path):
    process, _ = started = runs.start(stuck, addresses[:2], str(tmp_path / "lines"))
    first_worker(addresses[0])
    assert runs.finish(started) is None and process.exitcode == 1
    assert (tmp_path / "lines").read_text() == f"{LINE}\n"


def second_worker(path, model_dir, addresses, err):
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    strategy.REGISTRATION = workers.GRACE = 3
    told = f"strategy={{type: multi_worker, workers: [{', '.join(addresses)}], index: 1}}"
    return cli.main(["train", path, "--model-dir", model_dir, "--set", told])


@pytest.mark.full
def test_a_first_worker_that_is_lost_while_tensorflow_begins_is_named_and_not_waited_for(addresses, tmp_path):
    runs.corpus(tmp_path)
    path, err = runs.write(tmp_path, model={"depth": 1}), tmp_path / "err"
    process, _ = started = runs.start(second_worker, path, str(tmp_path / "model"), addresses[:2], str(err))
    first_worker(addresses[0])
    assert runs.finish(started) in (1, None) and process.exitcode in (0, 1)
    assert err.read_text().splitlines()[-1] == LINE


def train(folder, index, addresses):
    """Starts one worker of `flash-tf train` in a new process. Its lines go to `err0` or `err1`."""
    strategy = f"strategy={{type: multi_worker, workers: [{', '.join(addresses)}], index: {index}}}"
    arguments = [f"{folder}/config.yaml", "--model-dir", f"{folder}/model", "--set", strategy]
    with open(folder / f"err{index}", "w") as err:
        return subprocess.Popen([sys.executable, "-m", "flash_tf.cli", "train", *arguments], stderr=err)


@pytest.fixture
def run_of_two(tmp_path, addresses):
    """Makes a run of two workers, which are at work on its steps; ends them at last."""
    runs.corpus(tmp_path)
    train_options = {"steps": 10**6, "steps_per_loop": 20, "checkpoint_every": 10**6}
    runs.write(tmp_path, model={"depth": 1}, train=train_options, evaluation={"every": None})
    metrics, started = tmp_path / "model/metrics.jsonl", []

    def start():
        before = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
        started[:] = [train(tmp_path, index, addresses[:2]) for index in (0, 1)]
        while not metrics.is_file() or len(metrics.read_text().splitlines()) < before + 10:
            assert all(process.poll() is None for process in started), last_lines()
            time.sleep(0.05)
        return started

    def last_lines():
        return [(tmp_path / f"err{index}").read_text().splitlines()[-1] for index in (0, 1)]

    yield start, last_lines
    for process in started:
        process.kill()


@pytest.mark.full
@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_worker_stops_all_at_one_step_which_is_saved(run_of_two, told, tmp_path):
    start, last_lines = run_of_two
    for _ in range(2):  # the second time from the checkpoint of the first
        started = start()
        started[told].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in started] == [143, 143]
        assert last_lines() == ["flash-tf: stopped by SIGTERM; the same command goes on from here"] * 2
        saved = [int(folder.name[5:]) for folder in (tmp_path / "model/checkpoints").iterdir()]
        assert max(saved) == len(runs.losses(tmp_path / "model"))
    assert "going on from step" in (tmp_path / "err0").read_text()


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_that_is_killed_ends_the_other_with_a_line_that_names_it(run_of_two, killed):
    start, last_lines = run_of_two
    started = start()
    started[killed].kill()
    assert started[1 - killed].wait(60) == 1
    assert last_lines()[1 - killed] == (
        f"flash-tf: worker {killed} no longer answers: start all workers again, "
        "and they go on from the newest checkpoint"
    )
