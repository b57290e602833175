"""Sends what libraries write to standard error to a file, so that the user sees the package's own lines alone."""

import contextlib
import io
import os
import shutil
import stat
import sys
import tempfile

from flash_tf.training.progress import Progress


class LibraryLog:
    """Within it, all that libraries write to standard error, from Python or from C++, goes to a file.

    The file is one that nobody else can read, and whose name nobody can foresee. At the end it goes, unless `keep` was
    called.

    Attributes:
      console: The user's standard error.
    """

    def __enter__(self):
        sys.stderr.flush()
        self._python = sys.stderr
        self.console = os.fdopen(os.dup(2), "w", buffering=1, encoding=self._python.encoding, errors="backslashreplace")
        self._progress = Progress(self.console)
        lossy = io.BufferedWriter(_Lossy(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(lossy, "utf-8", "backslashreplace", line_buffering=True)
        try:
            file, self._private = tempfile.mkstemp(prefix="flash-tf-", suffix=".log")
        except OSError:  # no temporary folder can be written
            file, self._private = os.open(os.devnull, os.O_WRONLY), None
        self._path, self._kept = self._private or os.devnull, False
        self._take(file)
        return self

    def __exit__(self, *_):
        sys.stderr.flush()
        os.dup2(self.console.fileno(), 2)
        sys.stderr = self._python
        self.console.close()
        if not self._kept:
            self._remove()

    def keep(self) -> str:
        """The path of the file, which stays."""
        self._kept = True
        return self._path

    def move(self, path: str) -> None:
        """Goes on in another file, with what is written so far; a line says so if `path` cannot be written."""
        try:
            file = _plain(path)
        except OSError as error:
            self._progress.line(f"{path} needs to be a file, got: {error.strerror}; libraries write to {self.keep()}")
            return
        sys.stderr.flush()
        if self._private is not None:
            with open(self._private, "rb") as before, open(file, "ab", closefd=False) as after:
                shutil.copyfileobj(before, after)
        self._take(file)
        self._remove()
        self._path = path

    def progress(self) -> Progress:
        """The user's progress line."""
        return self._progress

    def _take(self, file):
        os.dup2(file, 2)
        os.close(file)

    def _remove(self):
        if self._private is not None:
            with contextlib.suppress(OSError):
                os.remove(self._private)
            self._private = None


class _Lossy(io.FileIO):
    """A file that loses what a full disk does not take, so that the command goes on to its own line."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _plain(path):
    """Opens a file to append to. It follows no link, waits for no reader of a pipe, and takes no device."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(0, "neither a file nor nothing", path)
