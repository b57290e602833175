"""One process for all exports, which has TensorFlow and TF-Text alone; signals that all processes hear."""

import gc
import itertools
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flash_tf.cli import SEARCH_EVERY

gc.set_threshold(SEARCH_EVERY)  # as commands do: with Python's 700, searches take a fourteenth of the time
TESTS = itertools.count(1)


@pytest.fixture(scope="session", autouse=True)
def heard():
    """A shell ignores SIGINT for work in the background, nohup SIGHUP; commands ignore what their parent ignores."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def few_programs():
    """Drops what JAX has compiled, from time to time: each program has maps of memory, and Linux allows 65,530."""
    yield
    if "jax" in sys.modules and next(TESTS) % 200 == 0:
        sys.modules["jax"].clear_caches()


@pytest.fixture
def interpreted(monkeypatch):
    """Fused kernels run by Pallas' interpreter."""
    from kernels_pallas import programs
    from tests import fused

    monkeypatch.setattr(programs, "run", fused.interpreted)


@pytest.fixture
def patched_kernels():
    """For a test that patches a kernel's source: no other test runs what was compiled of it."""
    from tests import fused

    fused.program.cache_clear()
    yield
    fused.program.cache_clear()


@pytest.fixture(scope="session")
def ask():
    """`ask(folder, requests)`: the answers of a process that knows nothing of this package; see `exporting.client`."""
    client = [sys.executable, "-I", str(Path(__file__).with_name("exporting") / "client.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(client, **pipes) as process:

        def ask(folder, requests):
            process.stdin.write(pickle.dumps((str(folder), list(requests))))
            process.stdin.flush()
            answers, modules = pickle.load(process.stdout)
            assert "tensorflow_text" in modules
            assert not {"flash_tf", "kernels_xla", "sentencepiece"} & set(modules)
            return answers

        yield ask
        process.stdin.close()
