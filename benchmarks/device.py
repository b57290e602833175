"""What all benchmarks share: the device, timings, tables, how a script ends. The standard library alone."""

import argparse
import contextlib
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)  # tokens of a sequence
TOKENS = 65_536  # of a step, which all comparisons of steps share
TASKS = {"causal_lm": "lm", "masked_lm": "mlm"}  # model type -> the task's name in results
# Peak dense bfloat16 FLOP/s of one device, from its datasheet. Keys are words of device names.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}


def cpu() -> str:
    """The processor, and how many of its cores this process may use."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"
    return platform.machine()


def peak_flops(device: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device by its name; None if it is unknown."""
    words = device.replace("-", " ").split()
    return next((peak for name, peak in PEAKS.items() if name in words), None)


def timing(milliseconds: Sequence[float], *, tokens: int, flops: int | None, device: str) -> dict[str, Any]:
    """The part of a row that follows from the times of single steps.

    Args:
      milliseconds: The time of each step, two or more.
      tokens: Tokens in a step.
      flops: Model FLOPs of a step; None if nobody counted them.
      device: The device's name, which gives the peak for MFU.
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
    """One line of a table. The first column is aligned left, the others right; None is a dash."""
    first, *rest = ("–" if value is None else str(value) for value in values)
    return first.ljust(widths[0]) + "".join(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))


def batch_size(n: int, tokens: int) -> int:
    """Sequences of n tokens in a step of `tokens`.

    Raises:
      ValueError: n does not divide `tokens`.
    """
    if n < 1 or tokens < n or tokens % n:
        raise ValueError(f"every length must divide --tokens ({tokens}), got {n}")
    return tokens // n


def takes_sizes(parser: argparse.ArgumentParser, lengths: Sequence[int] = LENGTHS) -> None:
    """Adds the options for the size of a step."""
    parser.add_argument("--lengths", nargs="+", type=int, default=lengths, metavar="N", help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="in a step, all sequences together (default 65,536)")


@contextlib.contextmanager
def libraries_in_log() -> Iterator[TextIO]:
    """Sends what libraries write to standard error to a private file; yields the user's standard error."""
    from flash_tf.library_log import LibraryLog  # peers, which share this file, need nothing of ours

    with LibraryLog() as log:
        yield log.console


def program(main: Callable[[], int]) -> None:
    """Runs `main` as a script. Bad input, or a package that is missing or too old, ends in one line and status 1."""
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
