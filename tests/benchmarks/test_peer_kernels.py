"""The benchmark of fla's kernels, as far as it goes without a GPU: its arguments, sizes and imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kernels, peer_kernels

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks.peer_kernels", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_bad_input_is_one_line():
    assert run("--lengths", "500") == (1, "peer_kernels: every length must divide --tokens (65536), got 500\n")
    assert run("--repeats", "1") == (1, "peer_kernels: --repeats must be 2 or more, for a median, got 1\n")


def test_missing_packages_are_one_line(monkeypatch):
    monkeypatch.setattr(peer_kernels.importlib.util, "find_spec", lambda name: None)  # as where none is installed
    with pytest.raises(ValueError, match="^it needs the packages torch and fla, and torch and fla cannot be imported$"):
        peer_kernels.main([])


def test_its_kernels_have_the_names_and_sizes_of_ours():
    assert {*peer_kernels.KERNELS} <= {*kernels.OF_MANY_HEADS}
    sizes = {"h": peer_kernels.HEADS, "s": peer_kernels.KEY, "e": peer_kernels.VALUE}
    assert sizes == kernels.MANY_HEADS


def test_it_imports_nothing_of_ours_but_the_benchmarks():
    code = (
        "import sys, benchmarks.peer_kernels\n"
        "ours = {'flash_tf', 'kernels_xla', 'keras', 'tensorflow', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {ours}' if ours else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
