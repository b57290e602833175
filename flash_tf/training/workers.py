"""What several processes of one run agree on: who is there, and the step at which all stop."""

import re
import selectors
import socket
import time
from collections.abc import Callable

import tensorflow as tf

REMINDER = 30  # seconds between two lines about workers that are missing
GO = b"go\n"


def several(strategy: tf.distribute.Strategy) -> bool:
    """Whether the strategy has several processes."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def largest(strategy: tf.distribute.Strategy, value: float) -> float:
    """The largest of the workers' values. Each worker calls it, and returns when the last one has."""
    if not several(strategy):
        return value
    values = strategy.experimental_distribute_values_from_function(lambda _: tf.constant([value], tf.float64))
    return float(tf.reduce_max(strategy.gather(values, axis=0)))


def join(addresses: list[str], index: int, timeout: float, report: Callable[[str], None]) -> None:
    """Waits until every worker has come.

    TensorFlow waits for an hour, without a word and without an answer to signals. So the first worker listens at its
    own address until each of the others has told its index there, lets them go, and TensorFlow begins.

    Args:
      addresses: host:port of each worker.
      index: The number of this worker.
      timeout: Seconds to wait.
      report: Called with a line about who is missing, twice a minute.

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
        _gather(endpoints[0][1], len(addresses), missing)
    else:
        _report_to(endpoints[0], index, missing)


def _endpoint(address):
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"strategy.workers needs host:port of each worker, got {address!r}")
    return host, int(port)


def _gather(port, count, missing):
    """Listens until all others have come, and lets them go."""
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
            connection.close()


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
    """Tells the first worker that this one is there, and waits until all are."""
    while True:
        try:
            with socket.create_connection(endpoint, timeout=0.5) as connection:
                connection.sendall(b"%d\n" % index)
                while True:
                    try:
                        said = connection.recv(64)
                    except TimeoutError:
                        continue
                    if said == GO:
                        return
                    break
        except OSError:
            pass
        missing([0])
        time.sleep(0.5)


def lost(error: tf.errors.OpError) -> OSError | None:
    """The error in plain words if it says that another worker ended."""
    gone = sorted(set(re.findall(r"/job:(?:worker|chief)/(?:replica:0/)?task:(\d+)", str(error))))
    if not gone or not isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
        return None
    them = f"worker {gone[0]} no longer answers" if len(gone) == 1 else "another worker no longer answers"
    return ConnectionError(f"{them}: start all workers again, and they go on from the newest checkpoint")
