"""Tiny artifacts, and the runner in a process where TensorFlow cannot be imported."""

import subprocess
import sys
from pathlib import Path

from flash_tf import config
from flash_tf.compiling import artifact
from flash_tf.compiling.programs import Experiment
from tests.training import runs

WITHOUT_TENSORFLOW = """
import importlib.abc, runpy, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras", "tf_keras", "orbit", "tensorflow_text", "yaml"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuse())
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__")
"""


def artifact_of(parent, task, *overrides, **sections):
    """The folder of an artifact of a config of one layer; see `runs.write`."""
    path = runs.write(parent, model={"type": task, "depth": 1, **sections.pop("model", {})}, **sections)
    experiment = Experiment(*artifact.resolve(config.load(path, overrides)))
    artifact.export("tiny", experiment, str(parent / "artifact"), None, lambda line: None)
    return parent / "artifact"


def run(*arguments):
    """The runner's status, standard output and standard error, without TensorFlow."""
    command = [sys.executable, "-c", WITHOUT_TENSORFLOW, "benchmarks.run_compiled", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return done.returncode, done.stdout, done.stderr
