"""Trains on JAX in a process of its own.

A job is `[config, model_dir, overrides, loops after which SIGTERM comes or null]`. A line for each says how it ended.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # to compile


def start(*jobs, devices=1, without_tensorflow=False):
    """Starts the jobs in a child with `devices` virtual CPUs; in one without TensorFlow, an import of it fails."""
    flags = {
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": f"{QUICK} --xla_force_host_platform_device_count={devices}",
        "JAX_ENABLE_X64": "0",
    }
    hidden = "import sys; sys.modules['tensorflow'] = None; " if without_tensorflow else "import sys; "
    code = f"{hidden}import json; from tests.training import jax_child; jax_child.main(json.loads(sys.argv[1]))"
    command = [sys.executable, "-c", code, json.dumps(jobs)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **flags}, text=True, stdout=-1, stderr=-1)


def train(*jobs, **options):
    """How each job ended: "" or its error. An error of the child itself is raised."""
    child = start(*jobs, **options)
    out, err = child.communicate()
    ended = [line.removeprefix("ended: ") for line in out.splitlines() if line.startswith("ended: ")]
    if len(ended) < len(jobs):
        raise RuntimeError(err[-3000:])
    return ended


def exchanged(path, sizes, mesh):
    """Bytes of activations that devices exchange in a step, for each of several lists of overrides."""
    job = [path, sizes, mesh]
    flags = {"KERAS_BACKEND": "jax", "XLA_FLAGS": f"{QUICK} --xla_force_host_platform_device_count=4"}
    code = "import json, sys; from tests.training import jax_child; jax_child.count(*json.loads(sys.argv[1]))"
    command = [sys.executable, "-c", code, json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **flags}, text=True, capture_output=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def count(path, sizes, mesh):
    import jax
    import numpy as np

    from benchmarks import keras_step
    from flash_tf import config as configs
    from flash_tf.training import modelling

    found = []
    for overrides in sizes:
        mapping = [f"strategy.mesh={json.dumps(mesh)}", *overrides]
        config = modelling.with_masking(configs.load(path, mapping))
        step = keras_step.make_step(config)
        shapes = {"tokens": (config.batch_size, config.data.sequence_length + 1), "window": (config.batch_size, 2)}
        batch = {name: jax.ShapeDtypeStruct(shape, np.int32, sharding=step.rows) for name, shape in shapes.items()}
        text = step.run.lower(step.state, batch, jax.ShapeDtypeStruct((), np.uint32)).compile().as_text()
        gathers = re.findall(r"= f32\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute)\(", text)
        found.append(sum(4 * math.prod(map(int, shape.split(","))) for shape in gathers))
    print(json.dumps(found))  # noqa: T201


def main(jobs):
    from flash_tf import config
    from flash_tf.training.on_jax import loop
    from flash_tf.training.progress import Progress

    class Stopping(Progress):
        def __init__(self, loops):
            super().__init__()
            self._left = loops

        def status(self, *parts, keep=False):
            if self._left is not None and parts[-1].startswith("|g|"):
                self._left -= 1
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGTERM)

    for path, model_dir, overrides, stop_after in jobs:
        said = ""
        try:
            loop.train(config.load(path, overrides), model_dir, Stopping(stop_after))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(f"ended: {' '.join(said.split())}", flush=True)  # noqa: T201
