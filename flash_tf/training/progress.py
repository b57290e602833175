"""What the user sees of long work, on one line."""

import math
import sys
import time
from typing import TextIO

# Peak dense bfloat16 FLOP/s of one device, by datasheet; keys are words of TensorFlow's device names.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}
WAITING = 0.1  # share of a loop spent waiting for input from which it is worth saying


class Progress:
    """Writes status lines: over each other on a terminal, one after the other elsewhere.

    Args:
      stream: Where to; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._overwrites = self._stream.isatty()
        self._open = False

    def status(self, text: str) -> None:
        """Shows the state of affairs, in place of the last."""
        self._stream.write(f"\r\033[K{text}" if self._overwrites else f"{text}\n")
        self._stream.flush()
        self._open = self._overwrites

    def line(self, text: str) -> None:
        """Shows something that stays."""
        self._stream.write(f"{chr(10) if self._open else ''}{text}\n")
        self._stream.flush()
        self._open = False

    def count(self, done: int, total: int, unit: str) -> None:
        """Shows how much of some work is done, as `tokenised 3 of 10 train shards`."""
        self.status(f"tokenised {done} of {total} {unit}")


class Clock:
    """Tokens per second and time left, over the time since it was made or reset."""

    def __init__(self):
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds


def training_line(
    record: dict, *, steps: int, tokens_per_second: float, mfu: float | None, left: float, waiting: float = 0.0
) -> str:
    """One line about a training loop; `waiting` is the share of its time that waited for input, said if it matters."""
    parts = [
        f"step {record['step']:,}/{steps:,}",
        f"loss {record['loss']:.4f}",
        f"ppl {perplexity(record['loss']):,.2f}",
        f"lr {record['learning_rate']:.2e}",
        f"|g| {record['gradient_norm']:.3f}",
        f"{tokens_per_second:,.0f} tok/s",
    ]
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}")
    if waiting > WAITING:
        parts.append(f"waiting for input {waiting:.0%}")
    return "  ".join([*parts, f"{duration(left)} left"])


def evaluation_line(evaluation: dict) -> str:
    """One line about an evaluation."""
    loss = f"step {evaluation['step']:,}  validation loss {evaluation['loss']:.4f}  ppl {evaluation['perplexity']:,.2f}"
    words = f"  word ppl {evaluation['word_perplexity']:,.2f}" if "word_perplexity" in evaluation else ""
    return f"{loss}{words}  (unigram {evaluation['unigram_perplexity']:,.2f})"


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
