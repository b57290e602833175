"""One process at a time writes a model directory."""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable

from etils import epath

from flash_tf import owned_files
from flash_tf.data import stored

OWNER = "owner.json"
BEAT = 10  # seconds between two signs of life
STALE = 3  # beats without a sign of life, after which an owner counts as dead
SETTLE = 1  # second, after which two processes that came at once see which of them wrote last


class Owner:
    """Owns a model directory inside a `with`.

    `owner.json` names the owner: its host, its process, and since when. The owner renews it every BEAT seconds. A lock
    on the file keeps others out, and a killed process does not leave it behind. Buckets have no locks, and some locks
    do not reach other hosts: there an owner counts as dead when its file stays the same for STALE beats. The clocks of
    two hosts are never compared.

    Args:
      model_dir: The model directory, local or gs://; None in a process that writes nothing.
      report: Called with a line before a wait.
      wait: Sleeps some seconds.

    Raises:
      ValueError: Another process owns the directory. Nothing in it was changed.
    """

    def __init__(
        self,
        model_dir: str | None,
        report: Callable[[str], None] = lambda line: None,
        wait: Callable[[float], None] = time.sleep,
    ):
        self._model_dir, self._report, self._wait = model_dir, report, wait
        self._path = f"{model_dir}/{OWNER}"
        self._name = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}
        self._lock = self._other = None
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._live, daemon=True)

    def __enter__(self):
        if self._model_dir is None:
            return self
        epath.Path(self._model_dir).mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            self._take(locked=self._locked(stack))
            self._lock = stack.pop_all()
        self._heart.start()
        return self

    def __exit__(self, *_):
        if self._model_dir is None:
            return
        self._ended.set()
        self._heart.join()
        with self._lock, contextlib.suppress(Exception):
            if not self._taken():
                stored.remove(self._path)

    def check(self) -> None:
        """Raises a ValueError if another process took the directory: this one was suspended, or cut off from it."""
        if self._other is not None:
            raise ValueError(f"{_named(self._other)} took {self._model_dir} from this process, which ends")

    def renew(self) -> None:
        """Gives a sign of life, or notes that another process took the directory."""
        with contextlib.suppress(Exception):  # a network may be away for a moment
            if not self._taken():
                self._write({**self._name, "alive": _now()})

    def _live(self):
        while self._other is None and not self._ended.wait(BEAT):
            self.renew()

    def _locked(self, stack):
        """Locks the file until the end of `stack`; False where files have no locks."""
        if not owned_files.is_local(self._model_dir):
            return False
        file = stack.enter_context(open(self._path, "a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._held(self._read()) from None
        except OSError:
            return False
        # The owner before may have deleted the file after it was opened here.
        there = os.path.exists(self._path) and os.path.samestat(os.fstat(file.fileno()), os.stat(self._path))
        return there or self._locked(stack)

    def _take(self, locked):
        new = locked and not os.path.getsize(self._path)  # made by this process, and not one that another is writing
        there = None if new else self._read()
        if there is not None and not (locked and there["host"] == self._name["host"]):
            self._see_no_life(there)
        self._write({**self._name, "alive": _now()})
        if not locked:
            self._wait(SETTLE)
            if self._taken():
                raise self._held(self._other)

    def _see_no_life(self, owner):
        """Returns when the owner has ended, or has given no sign of life for a while."""
        seconds = BEAT * STALE
        self._report(f"{_named(owner)} did not leave {self._model_dir}: waiting {seconds} s for a sign of its life")
        for _ in range(seconds):
            self._wait(1)
            if (now := self._read()) != owner:
                if now is None:
                    return
                raise self._held(now)

    def _held(self, owner):
        return ValueError(
            f"{self._model_dir} is in use by {_named(owner)}: wait for its end, or use another --model-dir"
        )

    def _taken(self):
        """Whether the file names another owner, who is noted."""
        there = self._read()
        if there is not None and {**there, **self._name} != there:
            self._other = there
        return self._other is not None

    def _read(self):
        """The owner in the file; None if there is none."""
        for _ in range(3):
            try:
                text = stored.read(self._path)
                return None if text is None else json.loads(text)
            except ValueError:  # another process is writing it
                self._wait(0.1)
        return None

    def _write(self, owner):
        with epath.Path(self._path).open("w") as file:  # in place: the lock is on this very file
            file.write(f"{json.dumps(owner)}\n")


def _now():
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _named(owner):
    if owner is None:
        return "another process"
    return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
