"""The command `flash-tf`: arguments in, text or one JSON object out.

Commands import TensorFlow when they run, so that --help is quick.
"""

import argparse
import contextlib
import errno
import gc
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from pathlib import Path

from flash_tf import __version__, commands
from flash_tf.library_log import LibraryLog

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 5  # seconds after a signal in which a command may clean up
INSIDE = re.compile(r"{{|\[Op:|__wrapped__|\x1b")  # in messages about the inside of a graph
OF_FILE = re.compile(r"(?:{{.*}} )?(\S.*); ([^;\[]+?)(?: \[Op:.*)?")  # TensorFlow's errors of a local file
# What TensorFlow says where a GPU has too little memory for it to begin with.
TAKEN = {
    "cudaSetDevice() on GPU": "another program has taken the GPU's memory: nvidia-smi shows which",
    "DNN library initialization failed": "cuDNN did not start: another program has taken the GPU's memory, which "
    "nvidia-smi shows, or the installed cuDNN is not the one that TensorFlow needs",
}
REASONS = {os.strerror(number) for number in errno.errorcode}
LONGEST = 1000  # characters of a message
KEPT_SECONDS = 30 * 24 * 3600  # a program that XLA compiled
# Objects between two searches for garbage. Imports and traced graphs hold a million objects, and lose none: with
# Python's 700, a fifth of the time to import TensorFlow goes into looking at them.
SEARCH_EVERY = 100_000
# Libraries that IMPORTERS import where they are installed, for functions that no command calls: a third of the time to
# import these.
IMPORTERS = ("tensorflow", "keras", "tf_keras")
UNUSED = {"sklearn", "matplotlib", "jax", "pandas", "scipy", "chardet", "cv2", "IPython"}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 for bad input or a failed run, 128 + n after signal n."""
    with _StoppedBySignals() as stopped:
        args = _parser().parse_args(arguments)
        with LibraryLog() as log:
            stopped.log = log
            try:
                os.environ["KERAS_BACKEND"] = backend = args.backend(args)  # noqa: TID251  whatever Keras is set to
                _keep_programs()
                # Taken whole at once, the memory of an H200 costs 3 s of every start.
                os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # noqa: TID251  a user may have set it
                with _hidden(UNUSED if backend == "tensorflow" else set()):  # JAX itself needs some
                    args.run(args, log)
                sys.stdout.flush()
            except BrokenPipeError:  # whoever reads what we print, as `head`, has seen enough
                return 128 + signal.SIGPIPE
            except (Exception, KeyboardInterrupt) as error:
                traceback.print_exc()  # into the log
                # A library may have put an error of its own in the place of ours.
                status, line = _explain(stopped.by or error, log)
                log.progress().line(f"flash-tf: {line}")
                return status
    return 0


class _Hidden(importlib.abc.MetaPathFinder):
    """Hides modules from IMPORTERS while these are imported. Other imports find them."""

    def __init__(self, names: set[str]):
        self._names = names

    def find_spec(self, name, path=None, target=None):
        parents = (getattr(sys.modules.get(importer), "__spec__", None) for importer in IMPORTERS)
        if name in self._names and any(getattr(spec, "_initializing", False) for spec in parents):
            raise ModuleNotFoundError(name)


@contextlib.contextmanager
def _hidden(names):
    finder = _Hidden(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Stopped(KeyboardInterrupt):
    """A signal asked the command to end, at a moment with nothing to save."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class _StoppedBySignals:
    """Within it, SIGINT, SIGTERM and SIGHUP end the command with a line. Training takes them over while it can save.

    A signal raises an error where the command is, so that the command cleans up. Modules in C++ crash on an error
    while they are imported, and libraries swallow some: during an import the process ends at once, and elsewhere after
    GRACE seconds.

    Attributes:
      by: The signal that came, as an error; None before.
      log: Shows the line, once it is there.
    """

    by: _Stopped | None = None
    log: LibraryLog | None = None

    def __enter__(self):
        asked = [n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN]  # `nohup` ignores SIGHUP
        self._before = {}
        if asked and threading.current_thread() is threading.main_thread():
            self._heard, self._told = socket.socketpair()
            self._told.setblocking(False)
            self._woken = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, daemon=True).start()
            self._before = {number: signal.signal(number, self._stop) for number in asked}
        return self

    def __exit__(self, *_):
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._woken)
            self._told.close()  # which ends the thread

    def _stop(self, number, frame):
        self.by = _Stopped(number)
        if _importing(frame):
            self._end(number)
        raise self.by

    def _watch(self):
        """Hears a signal while the main thread is in a library, and ends what goes on in spite of it."""
        with self._heard:
            if number := self._heard.recv(1):
                self._heard.settimeout(GRACE)
                try:
                    while self._heard.recv(1):
                        pass
                except TimeoutError:
                    self._end(number[0])

    def _end(self, number):
        line = f"flash-tf: stopped by {signal.Signals(number).name}"
        if self.log is None:
            print(line, file=sys.stderr)  # noqa: T201
        else:
            self.log.progress().line(line)
            self.log.__exit__()
        _remove_generated()
        os._exit(128 + number)


def _importing(frame) -> bool:
    """Whether a module is being imported."""
    while frame is not None and frame.f_globals.get("__name__") != "importlib._bootstrap":
        frame = frame.f_back
    return frame is not None


def program() -> None:
    """`main` as the console script: ends the process at once, before TensorFlow's farewell reaches the terminal."""
    _open_streams()
    gc.set_threshold(SEARCH_EVERY)
    try:
        status = main()
        sys.stdout.flush()
    except SystemExit as end:  # the parser has answered
        status = end.code
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    _remove_generated()
    os._exit(status)


def _remove_generated() -> None:
    """Removes the files of TensorFlow's AutoGraph, as it would itself at an ordinary end of the process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            with contextlib.suppress(OSError):
                os.remove(module.__file__)


def _open_streams() -> None:
    """Makes standard streams that take every text and are open: a file must not get the number of a closed one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the least free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")


def _keep_programs() -> None:
    """Lets TensorFlow keep what XLA compiles for a GPU, for a quicker next start. Drops what is a month old."""
    flags = os.environ.get("TF_XLA_FLAGS", "")  # noqa: TID251  TensorFlow reads it once, when it is imported
    if "tf_xla_persistent_cache_directory" in flags:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: TID251
    with contextlib.suppress(OSError, importlib.metadata.PackageNotFoundError):  # it does without
        # A program is for one version of TensorFlow, one kind of GPU and the options of XLA.
        options = f"{zlib.crc32(os.environ.get('XLA_FLAGS', '').encode()):08x}"  # noqa: TID251
        folder = home / "flash-tf" / f"xla-{importlib.metadata.version('tensorflow')}-{platform.node()}-{options}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for program in folder.parent.glob("xla-*/xla_compile_cache__*"):  # of other options and versions too
            if time.time() - program.stat().st_mtime > KEPT_SECONDS:
                program.unlink()
        ours = f"--tf_xla_persistent_cache_directory={folder} --tf_xla_persistent_cache_device_types=GPU"
        os.environ["TF_XLA_FLAGS"] = f"{flags} {ours}".strip()  # noqa: TID251


def _explain(error: BaseException, log: LibraryLog) -> tuple[int, str]:
    """Exit status and one line for what went wrong. Traces of errors that are not the user's are in the log."""
    number = getattr(error, "number", None)
    if type(error).__name__ == "Interrupted":
        return 128 + number, f"stopped by {error}; the same command goes on from here"
    if isinstance(error, _Stopped):
        return 128 + number, f"stopped by {error}"
    text = _said(error) or f"something failed that should not: the details are in {log.keep()}"
    text = re.sub(r"[\x00-\x1f\x7f]", "?", text)
    return 1, text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _said(error):
    """What is wrong with the input or the machine; empty if the error does not tell a user."""
    kinds = [kind.__name__ for kind in type(error).__mro__]  # by name: TensorFlow may not be there
    if isinstance(error, ModuleNotFoundError):
        extra = "jax" if error.name.partition(".")[0] in ("jax", "orbax") else "tensorflow"
        return f"this command needs {error.name}, which is not installed: pip install 'flash-tf[{extra}]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    if "OpError" in kinds and (taken := [line for said, line in TAKEN.items() if said in text]):
        return taken[0]
    if "OpError" in kinds and (of_file := OF_FILE.fullmatch(text)) and of_file[2] in REASONS:
        return f"{of_file[2]}: {of_file[1]}"
    if "ResourceExhaustedError" in kinds or "MemoryError" in kinds:  # and no full disk, for which it stands too
        return "the memory here is too small: lower train.tokens_per_step or the model's sizes"
    if INSIDE.search(text) or not (isinstance(error, ValueError | OSError | ImportError) or "OpError" in kinds):
        return ""
    return f"a file cannot be used: {text}" if "OpError" in kinds else text


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments."""

    def error(self, message):
        self.exit(2, f"flash-tf: {' '.join(message.split())}; see {self.prog} --help\n")

    def parse_known_args(self, args=None, namespace=None):
        """All arguments. A command refuses unknown ones, which argparse leaves to the parser of all commands."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flash-tf",
        description="Linear-time Transformers (FLASH, GAU, GLA, Mamba, ...) in Keras: train, evaluate, use, export.",
        epilog="`flash-tf COMMAND --help` shows the options of a command, and two examples.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"flash-tf {__version__}")
    found = parser.add_subparsers(required=True, title="commands", metavar="COMMAND")
    for name in commands.NAMES:
        module = importlib.import_module(f"{commands.__name__}.{name.replace('-', '_')}")
        purpose, _, examples = module.__doc__.partition("\n\nExamples:\n")
        command = found.add_parser(
            name,
            help=purpose.rstrip("."),
            description=purpose,
            epilog=f"examples:\n{examples.rstrip()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=module.run, backend=getattr(module, "backend", _backend))  # training asks its config
        module.add_arguments(command)
    return parser


def _backend(_):
    """TensorFlow, whose commands these are; where it is not installed, JAX serves those that only look at a config."""
    return "jax" if importlib.util.find_spec("tensorflow") is None else "tensorflow"


if __name__ == "__main__":
    program()
