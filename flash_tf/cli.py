"""The command `flash-tf`: arguments in, text or one JSON object out. TensorFlow is imported late: --help is quick."""

import argparse
import importlib
import os
import signal
import sys
import tempfile
import traceback

from flash_tf import commands


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 for bad input or a failed run, 128 + n after signal n."""
    args = _parser().parse_args(arguments)
    os.environ["KERAS_BACKEND"] = "tensorflow"  # noqa: TID251  the loop is TensorFlow's, whatever Keras is set to
    with _LibraryLog(f"{tempfile.gettempdir()}/flash-tf-{os.getuid()}.log") as log:
        try:
            args.run(args, log)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever reads what we print, as `head`, has seen enough
            return 128 + signal.SIGPIPE
        except Exception as error:
            traceback.print_exc()  # into the log
            status, line = _explain(error, log.path)
            print(f"flash-tf: {line}", file=log.console)  # noqa: T201
            return status
        except KeyboardInterrupt:
            print("flash-tf: interrupted", file=log.console)  # noqa: T201
            return 130
    return 0


def program() -> None:
    """`main` as the console script: ends the process at once, before TensorFlow's farewell reaches the terminal."""
    os._exit(main())


def _explain(error: Exception, log: str) -> tuple[int, str]:
    """Exit status and one line for what went wrong. Traces of errors that are not the user's are in the log."""
    number = getattr(error, "number", None)
    if type(error).__name__ == "Interrupted":
        return 128 + number, f"stopped by {error}; the same command goes on from here"
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ModuleNotFoundError):
        text = f"this command needs {error.name}, which is not installed: pip install 'flash-tf[tensorflow]'"
    if isinstance(error, ValueError | OSError | ImportError):
        return 1, text
    return 1, f"{type(error).__name__}: {text[:300]} (details in {log})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flash-tf", description="FLASH, GAU and Transformer language models in Keras: train, evaluate, describe."
    )
    found = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in commands.NAMES:
        module = importlib.import_module(f"{commands.__name__}.{name.replace('-', '_')}")
        text = module.__doc__.splitlines()[0]
        command = found.add_parser(name, help=text[0].lower() + text[1:].rstrip("."), description=text)
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser


class _LibraryLog:
    """Sends all that libraries write to standard error, from Python or from C++, to a file.

    Attributes:
      console: The user's standard error.
      path: The file.
    """

    def __init__(self, path: str):
        self.path = path

    def __enter__(self):
        sys.stderr.flush()
        self._python = sys.stderr
        self.console = os.fdopen(os.dup(2), "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        self.move(self.path)
        return self

    def __exit__(self, *_):
        sys.stderr.flush()
        os.dup2(self.console.fileno(), 2)
        sys.stderr = self._python
        self.console.close()

    def move(self, path: str) -> None:
        """Goes on in another file."""
        self.path = path
        with open(path, "a", encoding="utf-8") as file:
            os.dup2(file.fileno(), 2)

    def progress(self):
        """The user's progress line."""
        from flash_tf.training.progress import Progress

        return Progress(self.console)


if __name__ == "__main__":
    program()
