"""The progress of long work: on a terminal a line that fits its width, elsewhere only lines that last."""

import fcntl
import io
import os
import pty
import struct
import termios

import pytest

from flash_tf.training import progress
from flash_tf.training.progress import Progress

RECORD = {"step": 1_200, "loss": 3.25, "perplexity": 25.79, "learning_rate": 1e-3, "gradient_norm": 0.5}
PARTS = progress.training_parts(RECORD, steps=125_000, tokens_per_second=123_456.7, mfu=0.5, left=3_700, waiting=0.2)
EVALUATION = {"step": 5_000, "loss": 3.1, "perplexity": 22.2, "word_perplexity": 41.5, "unigram_perplexity": 1_234.5}


class Terminal:
    """A pseudo-terminal of some width; the terminal's own rules decide what is on its lines."""

    def __init__(self, columns):
        self._ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w")
        self.resize(columns)

    def resize(self, columns):
        self.columns = columns
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self):
        """All that was written; a terminal passes it on piece by piece."""
        self.stream.write("\1")
        self.stream.flush()
        found = b""
        while not found.endswith(b"\1"):
            found += os.read(self._ours, 65536)
        return found.decode().removesuffix("\1")

    def screen(self):
        """The rows on the screen; a row that is full goes on in the next one."""
        rows, column = [""], 0
        text = self.read().replace("\033[K", "\0")
        for letter in text:
            if letter == "\n":
                rows.append("")
            elif letter == "\r":
                column = 0
            elif letter == "\0":
                rows[-1] = rows[-1][:column]
            else:
                if column == self.columns:
                    rows.append("")
                    column = 0
                rows[-1] = rows[-1][:column] + letter + rows[-1][column + 1 :]
                column += 1
        return rows


@pytest.mark.parametrize("columns", [20, 50, 80, 132, 300])
@pytest.mark.parametrize("parts", [PARTS, progress.evaluation_parts(EVALUATION)])
def test_the_line_of_a_terminal_never_wraps_and_has_all_that_fits_the_most_important_first(columns, parts):
    terminal = Terminal(columns)
    shown = Progress(terminal.stream)
    for _ in range(3):
        shown.status(*parts)
    beginnings = ["  ".join(parts[:many]) for many in range(1, len(parts) + 1)]
    fit = [text for text in beginnings if len(text) < columns] or [f"{parts[0][: columns - 2]}…"]
    assert terminal.screen() == [fit[-1]]


def test_eighty_columns_have_step_loss_rate_and_time_left():
    terminal = Terminal(80)
    Progress(terminal.stream).status(*PARTS)
    assert terminal.screen() == ["step 1,200/125,000  loss 3.2500  123,457 tok/s  1h01m left"]


def test_a_terminal_that_becomes_narrower_gets_a_shorter_line():
    terminal = Terminal(132)
    shown = Progress(terminal.stream)
    shown.status(*PARTS)
    wide = terminal.screen()
    terminal.resize(50)
    shown.status(*PARTS)
    assert len(wide[0]) > 80 and terminal.screen() == ["step 1,200/125,000  loss 3.2500  123,457 tok/s"]


def test_lines_that_are_kept_stay_above_the_status_and_nothing_else_does():
    terminal = Terminal(80)
    shown = Progress(terminal.stream)
    for step in range(1, 7):
        shown.status(f"step {step}", keep=step % 3 == 0)
    shown.line("going on")
    shown.status("step 7")
    shown.evaluated(1, 2)
    assert terminal.screen() == ["step 3", "step 6", "going on", "evaluated 1 of 2 validation batches"]
    shown.evaluated(2, 2)
    assert terminal.screen() == [""]
    shown.tokenized(1, 2, "train shards")
    shown.tokenized(2, 2, "train shards")
    assert terminal.screen() == ["tokenized 2 of 2 train shards", ""]


def test_a_message_does_not_overwrite_the_status_before_it():
    terminal = Terminal(80)
    shown = Progress(terminal.stream)
    shown.status("step 7")
    shown.line("SIGTERM: saving")
    assert terminal.screen() == ["step 7", "SIGTERM: saving", ""]


def test_a_file_gets_lasting_lines_whole_and_no_control_characters():
    file = io.StringIO()
    shown = Progress(file)
    shown.status(*PARTS)
    shown.evaluated(1, 1)
    shown.clear()
    shown.line("going on")
    shown.status(*PARTS, keep=True)
    assert file.getvalue() == "going on\n" + "  ".join(PARTS) + "\n"


def test_a_file_gets_a_status_when_nothing_was_written_for_a_minute(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    file = io.StringIO()
    shown = Progress(file)
    for step, now in enumerate((101.0, 159.0, 161.0, 162.0, 222.0)):  # noqa: B007  the clock
        shown.status(f"step {step}")
    assert file.getvalue() == "step 2\nstep 4\n"


@pytest.mark.parametrize(
    ("steps", "between"), [(1, 1), (20, 1), (21, 2), (30, 2), (100, 5), (1_700, 100), (10_000, 500), (125_000, 1_000)]
)
def test_a_run_leaves_ten_to_twenty_lines_or_one_every_thousand_steps(steps, between):
    assert progress.lasting(steps) == between
