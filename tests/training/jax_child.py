"""Trains on JAX in a process of its own.

A job is `[config, model_dir, overrides, loops after which SIGTERM comes or null]`. A line for each says how it ended.
"""

import json
import os
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
