"""A run that is killed at random moments ends as one that is not: in its records, weights and evaluations."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.training import runs
from tests.training.test_strategies import free_ports

TIMED = {"tokens_per_second"}  # of a record; all else in it follows from config and text
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOST = ("no longer answers: start all workers again, and they go on from the newest checkpoint", ": not there")


def as_command(folder, *arguments, err="stderr"):
    """Starts `flash-tf` as a process of its own, which imports all that it needs."""
    (folder / "temporary").mkdir(exist_ok=True)
    environment, command = {**os.environ, "TMPDIR": str(folder / "temporary")}, [sys.executable, "-m", "flash_tf.cli"]
    with open(folder / "stdout", "w") as out, open(folder / err, "w") as lines:
        into = {"stdout": out, "stderr": lines, "env": environment, "preexec_fn": listen}
        return subprocess.Popen([*command, *map(str, arguments)], **into)


def listen():
    """Lets a process hear signals that the shell of these tests ignores, as it does in the background."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def ended(process):
    """Whether a process has ended, however it was started."""
    return (process.poll() if isinstance(process, subprocess.Popen) else process.exitcode) is not None


def status(process):
    """What a process ends with."""
    if isinstance(process, subprocess.Popen):
        return process.wait(300)
    process.join(300)
    return process.exitcode


def write(folder, steps):
    """The config of a run that saves every other step, and evaluates."""
    runs.corpus(folder)
    train = {"steps": steps, "keep": 2}
    return runs.write(folder, model={**runs.SMALLEST, "dropout": 0.1}, train=train, evaluation={"every": 16})


def done(model_dir):
    """Steps on disk so far."""
    metrics = model_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def outcome(model_dir):
    """All that a finished run leaves and that does not depend on the time it took."""
    folders = runs.checkpoints(model_dir)
    return {
        "records": [{k: v for k, v in record.items() if k not in TIMED} for record in runs.records(model_dir)],
        "evaluations": runs.records(model_dir, "evaluations.jsonl"),
        "checkpoints": {path.name: runs.bits(runs.state(model_dir, int(path.name[5:]))) for path in folders},
        "notes": [json.loads((path / "complete.json").read_text()) for path in folders],
        "left over": [path.name for path in model_dir.rglob("*") if path.name.endswith((".partial", "owner.json"))],
    }


class Killer:
    """Kills processes of a run at moments that a seed draws.

    Args:
      seed: Of the moments.
      seconds: From the start of a process to its first step.
      signals: Those to choose from.
    """

    def __init__(self, seed, seconds, signals=(signal.SIGKILL,)):
        self._seed, self._draw, self._seconds, self._signals = seed, random.Random(seed), seconds, signals
        self.kills = 0

    def kill(self, processes, model_dir):
        """Kills one of the processes. Returns its number, or None if the run has ended before."""
        number, there = self._draw.randrange(len(processes)), done(model_dir)
        steps, delay = there + self._draw.randint(1, 10), self._draw.uniform(0, 0.03)
        if self._draw.random() < 0.4:  # before its first step
            steps, delay = 0, self._draw.uniform(0, self._seconds)
        while done(model_dir) < steps and not ended(processes[number]):
            time.sleep(0.001)
        time.sleep(delay)
        sent = self._draw.choice(self._signals)
        if not ended(processes[number]):
            os.kill(processes[number].pid, sent)
        if status(processes[number]) != (-sent if sent == signal.SIGKILL else 128 + sent):
            return None
        self.kills += 1
        sys.stdout.write(f"seed {self._seed}, {self.kills}: {sent.name} to process {number}, {delay:.3f} s after ")
        sys.stdout.write(f"{f'step {steps}' if steps else 'its start'}; {done(model_dir)} steps are there\n")
        return number


def whole_run(start, folder, steps):
    """What a run leaves that is not killed, and the seconds from its start to its first step."""
    begun, processes = time.monotonic(), start("whole")
    while not done(folder / "whole") and not ended(processes[0]):
        time.sleep(0.01)
    seconds = time.monotonic() - begun
    assert [status(process) for process in processes] == [0] * len(processes)
    want = outcome(folder / "whole")
    assert [record["step"] for record in want["records"]] == list(range(1, steps + 1))
    assert want["evaluations"][-1]["step"] == steps and want["checkpoints"] and not want["left over"]
    return want, seconds


@pytest.mark.parametrize(
    ("begin", "kills", "seed"),
    [
        pytest.param(runs.start_command, 1, 1, id="1 in processes that have TensorFlow's modules"),
        pytest.param(as_command, 24, 2, id="24 of commands", marks=pytest.mark.full),
    ],
)
def test_a_run_that_is_killed_and_started_again_ends_as_one_that_is_not(tmp_path, begin, kills, seed):
    steps = 8 + 12 * kills
    path, runs_made = write(tmp_path, steps), 0

    def start(name):
        return [begin(tmp_path, "train", path, "--model-dir", tmp_path / name)]

    want, seconds = whole_run(start, tmp_path, steps)
    killer = Killer(seed, seconds)
    while killer.kills < kills:
        name, processes = f"killed{runs_made}", start(f"killed{runs_made}")
        if killer.kill(processes, tmp_path / name) is None or killer.kills == kills:
            while status(processes[0]) == -signal.SIGKILL:
                processes = start(name)
            assert status(processes[0]) == 0, (tmp_path / "stderr").read_text()
            assert outcome(tmp_path / name) == want
            runs_made += 1  # a run that was quicker than the kills leaves the rest of them to another one


@pytest.mark.full
def test_a_signal_at_any_moment_ends_a_run_with_a_line_at_a_step_that_is_saved(tmp_path):
    asked, steps = 30, 400
    path, number = write(tmp_path, steps), 0
    logs = lambda: list((tmp_path / "temporary").glob("flash-tf-*.log"))  # noqa: E731

    def start(name):
        process = as_command(tmp_path, "train", path, "--model-dir", tmp_path / name)
        while not logs():  # before that Python itself begins
            assert not ended(process)
            time.sleep(0.001)
        return [process]

    want, seconds = whole_run(start, tmp_path, steps)
    killer = Killer(4, seconds, SIGNALS)
    while killer.kills < asked:
        model_dir, processes = tmp_path / f"stopped{number}", start(f"stopped{number}")
        if killer.kill(processes, model_dir) is None:
            assert status(processes[0]) == 0, (tmp_path / "stderr").read_text()
            assert outcome(model_dir) == want
            number += 1
            continue
        name = signal.Signals(status(processes[0]) - 128).name
        *before, last = (tmp_path / "stderr").read_text().splitlines()
        assert last in (
            f"flash-tf: stopped by {name}",
            f"flash-tf: stopped by {name}; the same command goes on from here",
        )
        assert not [line for line in before if "flash-tf: " in line]
        saved = runs.checkpoints(model_dir)
        assert done(model_dir) == (int(saved[-1].name[5:]) if saved else 0)
        assert not logs() and not (model_dir / "owner.json").exists()
    assert status(start(model_dir.name)[0]) == 0
    assert outcome(model_dir) == want


@pytest.mark.full
def test_two_workers_either_of_which_is_killed_and_started_again_end_as_two_that_are_not(tmp_path):
    kills, steps = 10, 176
    path, runs_made = write(tmp_path, steps), 0

    def start(name):
        workers = ", ".join(f"localhost:{port}" for port in free_ports())
        strategies = [f"type: multi_worker, workers: [{workers}], join_timeout: 40, index: {i}" for i in (0, 1)]
        options = [("--model-dir", tmp_path / name, "--set", f"strategy={{{strategy}}}") for strategy in strategies]
        return [as_command(tmp_path, "train", path, *option, err=f"err{i}") for i, option in enumerate(options)]

    want, seconds = whole_run(start, tmp_path, steps)
    killer = Killer(3, seconds)
    while killer.kills < kills:
        name, processes = f"killed{runs_made}", start(f"killed{runs_made}")
        if (number := killer.kill(processes, tmp_path / name)) is not None:
            other = 1 - number
            assert status(processes[other]) == 1
            line = (tmp_path / f"err{other}").read_text().splitlines()[-1]
            assert line.startswith("flash-tf: ") and f"worker {number}" in line and line.endswith(LOST)
        if number is None or killer.kills == kills:
            processes = processes if number is None else start(name)
            assert [status(process) for process in processes] == [0, 0]
            assert outcome(tmp_path / name) == want
            runs_made += 1
