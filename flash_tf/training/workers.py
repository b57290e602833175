"""What several processes of one run agree on: who is there, and the step at which all stop."""

import contextlib
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

REMINDER = 30  # seconds between two lines about workers that are missing
GRACE = 5  # seconds in which TensorFlow may notice by itself that a worker is lost
GO, DONE = b"go\n", b"done\n"
LIBRARY = {"OpError", "JaxRuntimeError"}  # errors of TensorFlow and JAX; one of them may be missing


def several(strategy: Any) -> bool:
    """Whether a strategy of `tf.distribute` has several processes."""
    return hasattr(strategy, "peers")


def largest(strategy: Any, value: float) -> float:
    """The largest of the workers' values. Each worker calls it, and returns when the last one has."""
    if not several(strategy):
        return value
    import tensorflow as tf

    values = strategy.experimental_distribute_values_from_function(lambda _: tf.constant([value], tf.float64))
    return float(tf.reduce_max(strategy.gather(values, axis=0)))


def join(addresses: list[str], index: int, timeout: float, report: Callable[[str], None]) -> "Peers":
    """Waits until every worker has come.

    TensorFlow waits for an hour, without a word and without an answer to signals. So the first worker listens at its
    own address until each of the others has told its index there, lets them go, and TensorFlow begins. The connections
    stay, and end with a process.

    Args:
      addresses: host:port of each worker.
      index: The number of this worker.
      timeout: Seconds to wait.
      report: Called with a line about who is missing, twice a minute.

    Returns:
      The first worker's connections to the others, and theirs to it.

    Raises:
      ValueError: Two workers have one index or one address, or an address is not host:port.
      TimeoutError: A worker did not come in time.
      OSError: This machine cannot listen at the first worker's address.
    """
    start = last = time.monotonic()

    def missing(indices):
        nonlocal last
        them = ", ".join(f"{i} ({addresses[i]})" for i in indices)
        now = time.monotonic()
        if now - start > timeout:
            raise TimeoutError(f"worker {index} of {len(addresses)} waited {timeout:g} s for worker {them}: not there")
        if now - last > REMINDER:
            last = now
            report(f"waiting for worker {them}")

    endpoints = [_endpoint(address) for address in addresses]
    if len(set(endpoints)) < len(endpoints):
        raise ValueError(f"strategy.workers needs a host:port of its own for each worker, got {addresses}")
    if index == 0:
        return Peers(_gather(endpoints[0][1], len(addresses), missing), report)
    return Peers({0: _report_to(endpoints[0], index, missing)}, report)


def _endpoint(address):
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"strategy.workers needs host:port of each worker, got {address!r}")
    return host, int(port)


def _gather(port, count, missing):
    """Listens until all others have come, and lets them go. Returns the connection to each."""
    there = {}  # the connection of each worker
    with selectors.DefaultSelector() as ready, socket.create_server(("", port)) as server:
        ready.register(server, selectors.EVENT_READ)
        while len(there) < count - 1:
            for key, _ in ready.select(timeout=0.5):
                if key.fileobj is server:
                    ready.register(server.accept()[0], selectors.EVENT_READ)
                elif not _came(key.fileobj, there, count):
                    ready.unregister(key.fileobj)
                    key.fileobj.close()
            if absent := [i for i in range(1, count) if i not in there]:
                missing(absent)
        for connection in there.values():
            connection.sendall(GO)
    return there


def _came(connection, there, count):
    """Whether a worker has told its index, and not gone away. Keeps `there`."""
    said = connection.recv(64)
    index = int(said) if said.strip().isdigit() else 0
    if index in there:
        raise ValueError(f"two workers have strategy.index {index}: each needs its own")
    if 0 < index < count:
        there[index] = connection
        return True
    for one in [one for one, other in there.items() if other is connection]:
        del there[one]
    return False


def _report_to(endpoint, index, missing):
    """Tells the first worker that this one is there, and waits until all are. Returns the connection."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            connection = stack.enter_context(socket.create_connection(endpoint, timeout=0.5))
            connection.sendall(b"%d\n" % index)
            if _told(connection) == GO:
                stack.pop_all()
                return connection
        missing([0])
        time.sleep(0.5)


def _told(connection):
    """What the other end says, however long it takes."""
    while True:
        with contextlib.suppress(TimeoutError):
            return connection.recv(64)


class Peers:
    """The other workers of a run. One is lost if its connection ends before the run has.

    Calls of TensorFlow and JAX cannot be interrupted, and some wait an hour for a worker that is lost. If such a call
    does not end soon, the process does.

    Args:
      connections: Index of a worker -> the connection to it.
      report: Called with a line about a worker that is lost.
    """

    def __init__(self, connections: dict[int, socket.socket], report: Callable[[str], None]):
        self._connections, self._report, self._lost = connections, report, None
        self._known, self._left = threading.Event(), threading.Event()

    def watch(self) -> None:
        """Notices from here on who is lost."""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        self._lost = self._first_lost()
        if self._lost is None:
            return
        self._known.set()
        for index in self._connections.keys() - {self._lost}:
            with contextlib.suppress(OSError):
                self._connections[index].sendall(b"%d\n" % self._lost)
        if not self._left.wait(GRACE):
            self._report(f"flash-tf: {_lost(self._lost)}")
            os._exit(1)

    def _first_lost(self):
        """The first worker that is lost; None when all have done their work."""
        with selectors.DefaultSelector() as ready:
            for index, connection in self._connections.items():
                ready.register(connection, selectors.EVENT_READ, index)
            while ready.get_map():
                for key, _ in ready.select():
                    if (said := _said(key.fileobj)) != DONE:  # the first worker names the one that is lost
                        return int(said) if said.strip().isdigit() else key.data
                    ready.unregister(key.fileobj)
        return None

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Puts an error that names the lost worker in the place of TensorFlow's or JAX's."""
        try:
            yield
        except Exception as error:
            if not LIBRARY & _kinds(error):
                raise
            if self._known.wait(1):
                raise _lost(self._lost) from error
            raise lost(error) or error from None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """The work of a run. Its end without an error is no loss to the others."""
        try:
            with self.naming():
                yield
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.sendall(DONE)
        finally:
            self._left.set()


def _said(connection):
    """What a worker says; nothing if it is gone."""
    try:
        return _told(connection)
    except OSError:
        return b""


def together(strategy: Any) -> contextlib.AbstractContextManager:
    """The work of a run, in which a worker that is lost is named."""
    return strategy.peers.together() if several(strategy) else contextlib.nullcontext()


def lost(error: Exception) -> OSError | None:
    """TensorFlow's error in plain words if it says that another worker ended."""
    gone = sorted(set(re.findall(r"/job:(?:worker|chief)/(?:replica:0/)?task:(\d+)", str(error))))
    if not gone or not {"UnavailableError", "AbortedError"} & _kinds(error):
        return None
    return _lost(gone[0] if len(gone) == 1 else None)


def _kinds(error):
    return {kind.__name__ for kind in type(error).__mro__}


def _lost(index):
    who = "another worker" if index is None else f"worker {index}"
    return ConnectionError(
        f"{who} no longer answers: start all workers again, and they go on from the newest checkpoint"
    )
