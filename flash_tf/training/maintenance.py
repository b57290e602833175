"""Notices that a Cloud VM is about to stop, and ends the run as a signal does."""

import contextlib
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator

# https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice and .../instances/preemptible
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance"
COMING = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}
LOOK = 5  # seconds between two questions to the VM


@contextlib.contextmanager
def watched(report: Callable[[str], None]) -> Iterator[None]:
    """Within it, this process gets SIGTERM when its Cloud VM is about to be stopped. Elsewhere nothing is asked again.

    Args:
      report: Called with a line about what is coming.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(ended, report), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _watch(ended, report):
    with contextlib.suppress(OSError):  # no Cloud VM
        while not ended.wait(LOOK):
            for name, value in COMING.items():
                if _told(name) == value and not ended.is_set():
                    report(f"this VM will stop ({name} {value}): ending after this loop of steps")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return


def _told(name):
    request = urllib.request.Request(f"{METADATA}/{name}", headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=LOOK) as answer:
        return answer.read().decode().strip()
