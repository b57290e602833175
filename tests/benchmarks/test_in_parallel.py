"""Commands as child processes: how many at a time, what is said of them, and which runs are not trained again."""

import io
import os
import signal
import sys
import time

import pytest

from benchmarks import in_parallel
from benchmarks.in_parallel import Command, Training
from flash_tf.training.progress import Progress


@pytest.fixture
def child(monkeypatch):
    """Sets the program of a child, whose arguments are the command's."""
    monkeypatch.setattr(in_parallel, "POLL", 0.02)
    return lambda program: monkeypatch.setattr(in_parallel, "CHILD", (sys.executable, "-S", "-c", program))


def commands(folder, *names):
    return [Command((name,), folder / f"{name}.log") for name in names]


def test_commands_end_with_their_statuses_in_order_and_a_failed_one_is_shown_with_its_last_line(tmp_path, child):
    child("import sys; print('works on', sys.argv[1]); sys.exit('no such file' if sys.argv[1] == 'b' else 0)")
    console = io.StringIO()
    assert in_parallel.run(commands(tmp_path, "a", "b", "c"), 2, Progress(console)) == [0, 1, 0]
    assert (tmp_path / "a.log").read_text() == "$ flash-tf a\nworks on a\nexit status 0\n"
    (failed,) = (line for line in console.getvalue().splitlines() if "failed" in line)
    assert failed.startswith("b: ") and failed.endswith(f"failed with status 1, see {tmp_path}/b.log: no such file")
    assert len(console.getvalue().splitlines()) == 3


def test_a_command_that_lacked_memory_beside_others_runs_once_more_alone(tmp_path, child):
    child("import os, pathlib, sys, time; own = pathlib.Path(sys.argv[1]); beside = 'TF_GPU_ALLOCATOR' in os.environ\n"
          "own.open('a').write('.'); lacks = own.name == 'c' or (own.name == 'b' and beside)\n"
          "sys.exit('flash-tf: the memory here is too small: lower it' if lacks else own.name == 'd')")  # fmt: skip
    given = [Command((str(tmp_path / name),), tmp_path / f"{name}.log") for name in "abcd"]
    console, ended = io.StringIO(), []
    assert in_parallel.run(given, 2, Progress(console), lambda *one: ended.append(one)) == [0, 0, 1, 1]
    assert [len((tmp_path / name).read_text()) for name in "abcd"] == [1, 2, 2, 1]
    assert sorted(ended) == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 1), (3, 1)]
    assert "2 of them lacked memory beside others: again, one at a time" in console.getvalue()
    assert in_parallel.run(given[2:3], 1, Progress(console)) == [1]
    assert len((tmp_path / "c").read_text()) == 3


def test_at_most_so_many_run_at_a_time_and_share_a_gpu(tmp_path, child):
    child("import os, time; print(time.time()); time.sleep(.3)"
          "; print(time.time(), os.environ.get('TF_GPU_ALLOCATOR'))")  # fmt: skip
    assert in_parallel.run(commands(tmp_path, "a", "b", "c"), 2, Progress(io.StringIO())) == [0, 0, 0]
    times = []
    for name in "abc":
        _, begun, ended, _ = (tmp_path / f"{name}.log").read_text().splitlines()
        ended, allocator = ended.split()
        assert allocator == "cuda_malloc_async"
        times.append((float(begun), float(ended)))
    assert max(sum(a <= begun < b for a, b in times) for begun, _ in times) <= 2
    assert in_parallel.run(commands(tmp_path, "d"), 1, Progress(io.StringIO())) == [0]
    assert (tmp_path / "d.log").read_text().splitlines()[2].endswith(" None")  # one alone keeps TensorFlow's own
    with pytest.raises(ValueError, match="--parallel must be 1 or more, got 0"):
        in_parallel.run([], 0, Progress(io.StringIO()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_children(tmp_path, child, monkeypatch, number):
    child("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    log, progress = tmp_path / "a.log", Progress(io.StringIO())

    def interrupted(*parts):
        if len(log.read_text().splitlines()) > 1:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(progress, "status", interrupted)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_parallel.run(commands(tmp_path, "a", "b"), 2, progress)
    assert time.monotonic() - begun < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().splitlines()[1]), 0)


def test_a_complete_run_is_not_trained_again_until_its_config_or_command_changes(tmp_path, child):
    config, count = tmp_path / "small.yaml", tmp_path / "count"
    config.write_text("model:\n")
    child(f"import os, sys; os.makedirs(sys.argv[4], exist_ok=True); open({str(count)!r}, 'a').write('x')")
    run = Training(str(config), tmp_path / "run", ("train.steps=2",))

    def trained(one):
        assert in_parallel.train([one], 1, Progress(io.StringIO())) == [True]
        return len(count.read_text())

    assert str(run.command) == f"flash-tf train {config} --model-dir {tmp_path}/run --set train.steps=2"
    assert [trained(run), trained(run)] == [1, 1]
    assert [trained(run._replace(overrides=())), trained(run), trained(run)] == [2, 3, 3]
    later = time.time() + 5
    os.utime(config, (later, later))
    assert trained(run) == 4
    child("import sys; sys.exit('gone wrong')")
    assert in_parallel.train([run], 1, Progress(io.StringIO())) == [False]


def test_each_complete_run_is_given_once_when_it_ends(tmp_path, child):
    child("import os, sys; 'b' in sys.argv[4] and sys.exit('gone wrong'); os.makedirs(sys.argv[4], exist_ok=True)")
    runs, ended = [Training("recall/flash", tmp_path / name) for name in ("a1", "b1", "c1")], []
    assert in_parallel.train(runs, 1, Progress(io.StringIO()), ended.append) == [True, False, True]
    assert ended == [runs[0], runs[2]]
    assert in_parallel.train(runs, 1, Progress(io.StringIO()), ended.append) == [True, False, True]
    assert ended == [runs[0], runs[2]] * 2


def test_the_rate_of_a_run_is_of_its_loops_but_the_first_and_the_last(tmp_path):
    run = Training("recall/flash", tmp_path)
    assert in_parallel.tokens_per_second(run) is None
    lines = [f'{{"tokens_per_second": {rate}}}\n' * 2 for rate in (1.0, 30.0, 50.0, 40.0, 9.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert in_parallel.tokens_per_second(run) == 40.0
