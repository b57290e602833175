"""Tiny artifacts, token files, and the runner in a process where TensorFlow cannot be imported."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from flash_tf import config
from flash_tf.compiling import artifact
from flash_tf.compiling.programs import Experiment
from flash_tf.training import restore
from flash_tf.training.run import make_cache, make_tokenizer
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


def folder_of(parent, task, *overrides, **sections):
    """A folder with a corpus, its tokenizer, a config of one layer and an artifact of it; see `runs.write`."""
    runs.corpus(parent)
    model = {"type": task, "depth": 1, **sections.pop("model", {})}
    path = runs.write(parent, model=model, **sections)
    make_tokenizer(config.load(path), str(parent), chief=True, report=lambda line: None)
    given = f"data.tokenizer={parent}/tokenizer.model"
    experiment = Experiment(*artifact.resolve(config.load(path, [given, *overrides])))
    artifact.export("tiny", experiment, str(parent / "artifact"), None, lambda line: None)
    return parent


def token_cache(folder, split):
    """The tokens of a split of a folder's corpus."""
    experiment = config.load(str(folder / "config.yaml"))
    return make_cache(experiment, str(folder), restore.load_tokenizer(experiment, str(folder)), split, lambda *_: None)


def token_files(folder):
    """Arguments that name the token files of both splits, which it writes."""
    paths = {}
    for split in ("train", "validation"):
        paths[split] = folder / f"{split}.npy"
        np.save(paths[split], token_cache(folder, split).get(0).tokens)
    return ["--tokens", paths["train"], "--validation", paths["validation"]]


def start(*arguments, module="benchmarks.run_compiled"):
    """The runner, started without TensorFlow."""
    command = [sys.executable, "-c", WITHOUT_TENSORFLOW, module, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


def run(*arguments, module="benchmarks.run_compiled"):
    """The runner's status, standard output and standard error."""
    process = start(*arguments, module=module)
    out, err = process.communicate()
    return process.returncode, out, err


def records(folder, name="losses.jsonl"):
    """Its records without times."""
    lines = [json.loads(line) for line in Path(folder, name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
