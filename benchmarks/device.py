"""What all benchmarks share: where and how something was timed, result files, tables. The standard library alone."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[1]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)  # of a sequence, in tokens
TASKS = {"causal_lm": "lm", "masked_lm": "mlm"}  # as results call what models of a type learn
# Peak dense bfloat16 FLOP/s of one device, by datasheet; keys are words of device names.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}


class Results:
    """A result file, rewritten after each row: what was measured stays when a run is interrupted.

    Args:
      args: Of the script, with those that `takes_result` adds; they are written too, as its flags.
      benchmark: Name of the script.
      device: Name of the device that was timed.
      packages: Whose versions decide the figures.
      rows: Those to begin with: of `kept`.

    Attributes:
      rows: What was measured, each a flat dictionary.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        benchmark: str,
        *,
        device: str,
        packages: Sequence[str],
        rows: Sequence[dict[str, Any]] = (),
    ):
        self._path, self.rows = args.json, [*rows]
        self._head = {
            "benchmark": benchmark,
            "device": device,
            "commit": args.commit or commit(),
            "versions": {"python": platform.python_version(), **versions(packages)},
            "flags": {name: value for name, value in vars(args).items() if name not in ("json", "commit")},
        }
        self._write()  # a path that cannot be written to is known before anything is timed

    def add(self, row: dict[str, Any]) -> None:
        """Keeps a row, and writes the file."""
        self.rows.append(row)
        self._write()

    def _write(self):
        if self._path is not None:
            file = Path(self._path)
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f"{file.name}.partial")  # a reader, or a kill, never meets half a file
            partial.write_text(json.dumps({**self._head, "rows": self.rows}, indent=1) + "\n")
            partial.replace(file)


def kept(path: str | None, device: str) -> list[dict[str, Any]]:
    """The rows of a result file that is there, for a script that is stopped and started again.

    Raises:
      ValueError: When it holds no result, or one of another device.
    """
    if path is None or not Path(path).exists():
        return []
    try:
        found = json.loads(Path(path).read_text())
        rows, measured_on = found["rows"], found["device"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no result to go on with: name another file") from error
    if rows and measured_on != device:
        raise ValueError(f"{path} has rows of {measured_on}, this would add some of {device}: name another file")
    return rows


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """The checked-out commit, with `-dirty` where files differ from it; "unknown" outside a checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def cpu() -> str:
    """The processor, and how many of its cores this process may use."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"
    return platform.machine()


def peak_flops(device: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device by its name; None where it is unknown."""
    words = device.replace("-", " ").split()
    return next((peak for name, peak in PEAKS.items() if name in words), None)


def timing(milliseconds: Sequence[float], *, tokens: int, flops: int | None, device: str) -> dict[str, Any]:
    """The part of a row that follows from the times of single steps.

    Args:
      milliseconds: Of each step, two or more.
      tokens: In a step.
      flops: Model FLOPs of a step; None where nobody counted them.
      device: Its name, for the peak.
    """
    low, median, high = statistics.quantiles(milliseconds, n=4)
    rate, peak = flops and flops / median * 1e3, peak_flops(device)
    return {
        "median_ms": median,
        "quartiles_ms": [low, high],
        "steps": len(milliseconds),
        "tokens_per_second": tokens / median * 1e3,
        "model_flops": flops,
        "model_flops_per_second": rate,
        "mfu": rate / peak if rate and peak else None,
    }


def table_line(values: Sequence[Any], widths: Sequence[int]) -> str:
    """One line of a table: the first column to the left, the others to the right; None as a dash."""
    first, *rest = ("–" if value is None else str(value) for value in values)
    return first.ljust(widths[0]) + "".join(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))


def batch_size(n: int, tokens: int) -> int:
    """Sequences of n tokens in a step of `tokens`.

    Raises:
      ValueError: Unless n divides `tokens`.
    """
    if n < 1 or tokens < n or tokens % n:
        raise ValueError(f"every length must divide --tokens ({tokens}), got {n}")
    return tokens // n


def takes_sizes(parser: argparse.ArgumentParser, lengths: Sequence[int] = LENGTHS) -> None:
    """Adds the options that say what size a step has."""
    parser.add_argument("--lengths", nargs="+", type=int, default=lengths, metavar="N", help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=65_536, help="of all sequences together (default 65,536)")


def takes_result(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where a result goes and what commit it is of."""
    parser.add_argument("--json", metavar="FILE", help="write the result here, after each row")
    parser.add_argument("--commit", default=None, help="of the code, where it runs outside its checkout")


@contextlib.contextmanager
def libraries_in_log(name: str) -> Iterator[TextIO]:
    """Sends what libraries write to standard error, from Python or C++, to a file; gives the user's standard error."""
    path = f"{tempfile.gettempdir()}/flash-tf-{name}-{os.getuid()}.log"
    sys.stderr.flush()
    console = os.fdopen(os.dup(2), "w", buffering=1)
    with open(path, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield console
    finally:
        sys.stderr.flush()
        os.dup2(console.fileno(), 2)
        console.close()


def program(main: Callable[[], int]) -> None:
    """Runs `main` as a script: bad input, or a package that is not there or not as needed, is one line and status 1."""
    name = Path(sys.argv[0]).stem
    try:
        sys.exit(main())
    except ModuleNotFoundError as error:
        sys.exit(f"{name}: it needs the package {error.name}")
    except ImportError as error:
        sys.exit(f"{name}: it needs another version of {error.name}: {error.msg}")
    except (ValueError, OSError) as error:
        file = isinstance(error, OSError) and error.filename
        text = f"{error.strerror}: {error.filename}" if file else " ".join(str(error).split())
        sys.exit(f"{name}: {text}")
    except KeyboardInterrupt:
        sys.exit(130)
