"""The benchmark of peers, as far as it goes without PyTorch: its arguments, and what it counts."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from flash_tf import config, model_stats
from flash_tf.training import modelling

ROOT = Path(__file__).parents[2]


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode, done.stderr


def test_bad_input_is_one_line():
    assert run("--lengths", "500") == (1, "peers: every length must divide --tokens (65536), got 500\n")
    assert run("--steps", "3") == (1, "peers: --steps must be 10 or more, for a median, got 3\n")


def test_missing_pytorch_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    with pytest.raises(ValueError, match="^it needs PyTorch with CUDA: pip install torch$"):
        peers.main([])


@pytest.mark.parametrize("more", [["--tasks", "mlm"], ["--attention", "flash"], ["--compile", "whole"]])
def test_options_of_the_transformer_do_not_go_with_another_model(monkeypatch, more):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)  # as where PyTorch is installed
    with pytest.raises(ValueError, match=f"^{more[0]} does not go with --model gla$"):
        peers.main(["--model", "gla", *more])


def test_it_imports_nothing_of_ours_but_the_benchmarks():
    code = (
        "import sys, benchmarks.peers\n"
        "ours = {'flash_tf', 'kernels_xla', 'keras', 'tensorflow', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {ours}' if ours else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("task", "name"), [("lm", "lm_wiki40b"), ("mlm", "mlm_c4")])
def test_its_transformer_has_the_flops_of_ours(task, name):
    for n in (512, 8192):
        ours = config.load(f"{name}/transformer_plus_plus", [f"data.sequence_length={n}", f"train.tokens_per_step={n}"])
        ours = modelling.with_masking(ours)
        with model_stats.without_weights():
            assert peers.training_flops(n, task) == modelling.training_flops_per_step(ours, modelling.make_model(ours))
