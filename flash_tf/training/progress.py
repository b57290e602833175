"""What the user sees of long work: one line that redraws, and lines that stay."""

import itertools
import math
import os
import sys
import threading
import time
from typing import TextIO

# Peak dense bfloat16 FLOP/s of one device, by datasheet; keys are words of TensorFlow's device names.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}
WAITING = 0.1  # share of a loop spent waiting for input from which it is worth saying
QUIET = 60  # seconds after which a log gets a line, whether it is to last or not
CLEAR = "\r\033[K"  # back to the first column, and empty the line


class Progress:
    """Shows how far some work is, from any thread.

    On a terminal a status redraws one line, which never wraps: what does not fit is left out. Elsewhere, in a file or
    a pipe, only lasting lines are written, and a status when nothing was written for a minute.

    Args:
      stream: Where to write; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._lock, self._open, self._written = threading.Lock(), False, time.monotonic()

    def status(self, *parts: str, keep: bool = False) -> None:
        """Shows the state of the work in place of the last state.

        Args:
          parts: The most important first. A terminal shows as many as its width allows.
          keep: Whether the line stays when the next one comes.
        """
        with self._lock:
            if self._terminal:
                self._write(f"{CLEAR}{fitted(parts, self._columns())}", ends=keep)
            elif keep or time.monotonic() - self._written >= QUIET:
                self._write("  ".join(parts), ends=True)

    def line(self, text: str) -> None:
        """Writes a line that stays, whole; so does the status before it."""
        with self._lock:
            self._write(f"{chr(10) if self._open else ''}{text}", ends=True)

    def clear(self) -> None:
        """Takes the last status away, before something else is printed on the terminal."""
        with self._lock:
            if self._open:
                self._write(CLEAR, ends=False)
                self._open = False

    def tokenized(self, done: int, total: int, unit: str) -> None:
        """Shows `tokenized 3 of 10 train shards`; the last of them stays."""
        self.status(f"tokenized {done:,} of {total:,} {unit}", keep=done == total)

    def evaluated(self, done: int, total: int) -> None:
        """Shows how many validation batches are done; nothing stays of it."""
        self.status(f"evaluated {done:,} of {total:,} validation batches")
        if done == total:
            self.clear()

    def _write(self, text, *, ends):
        self._stream.write(f"{text}{chr(10) * ends}")
        self._stream.flush()
        self._open, self._written = not ends, time.monotonic()

    def _columns(self):
        """The width that may be used: in the last column some terminals wrap already. Read anew, for it may change."""
        return (os.get_terminal_size(self._stream.fileno()).columns or 80) - 1


def fitted(parts: tuple[str, ...], columns: int) -> str:
    """The parts side by side, as many as fit into so many columns; the first is cut off if it alone is too long."""
    widths = itertools.accumulate((len(part) + 2 for part in parts), initial=-2)
    many = max(1, sum(width <= columns for width in widths) - 1)
    text = "  ".join(parts[:many])
    return text if len(text) <= columns else f"{text[: columns - 1]}…"


def lasting(steps: int) -> int:
    """Steps between lines that stay: 1, 2 or 5 times a power of ten, for ten to twenty lines; at most 1,000."""
    sizes = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return min(1_000, next(size for size in sizes if size * 20 >= steps))


class Clock:
    """Tokens per second and time left, over the time since it was made or reset."""

    def __init__(self):
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds


def training_parts(
    record: dict, *, steps: int, tokens_per_second: float, mfu: float | None, left: float, waiting: float = 0.0
) -> list[str]:
    """The state of a training loop, the most important first.

    Args:
      record: The last step's.
      steps: Of the whole run.
      tokens_per_second: Of the last loop.
      mfu: Model FLOPs utilization, None where the devices' peak is unknown.
      left: Seconds to the last step.
      waiting: Share of the time that waited for input; shown if it matters.
    """
    more = [
        f"waiting for input {waiting:.0%}" if waiting > WAITING else "",
        f"ppl {record['perplexity']:,.2f}" if "perplexity" in record else "",
        "" if mfu is None else f"MFU {mfu:.1%}",
        f"lr {record['learning_rate']:.2e}",
        f"|g| {record['gradient_norm']:.3f}",
    ]
    return [
        f"step {record['step']:,}/{steps:,}",
        f"loss {record['loss']:.4f}",
        f"{tokens_per_second:,.0f} tok/s",
        f"{duration(left)} left",
        *filter(None, more),
    ]


def evaluation_parts(evaluation: dict) -> list[str]:
    """The result of an evaluation, the most important first."""
    if "perplexity" not in evaluation:  # of a task
        figures = {
            name: value for name, value in evaluation.items() if name not in ("step", "loss", "labels", "questions")
        }
        first = f"step {evaluation['step']:,}  validation loss {evaluation['loss']:.4f}"
        return [first, *(f"{name} {value:.4f}" for name, value in figures.items())]
    words = [f"word ppl {evaluation['word_perplexity']:,.2f}"] if "word_perplexity" in evaluation else []
    return [
        f"step {evaluation['step']:,}  validation loss {evaluation['loss']:.4f}",
        f"ppl {evaluation['perplexity']:,.2f}",
        *words,
        f"(unigram {evaluation['unigram_perplexity']:,.2f})",
    ]


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def duration(seconds: float) -> str:
    """A time span in words: 42s, 3m05s, 2h10m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def peak_flops(device_name: str, precision: str, replicas: int) -> float | None:
    """Peak FLOP/s of all replicas together, each on such a device; None where it is unknown or not bfloat16."""
    words = device_name.replace("-", " ").split()
    peak = next((peak for name, peak in PEAKS.items() if name in words), None)
    return peak * replicas if peak and precision == "mixed_bfloat16" else None
