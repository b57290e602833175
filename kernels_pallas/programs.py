"""Runs fused kernels on the backend: Pallas on JAX, and in TensorFlow the programs that Pallas lowers to.

TensorFlow's XLA runs a Triton kernel as a custom call in a StableHLO program. JAX must be of TensorFlow's age to write
a program that it can read. So an environment of its own lowers the kernels, once for each source and sizes, and the
programs stay in a folder that can be copied to a machine without that environment. `HOME` has both.
"""

import dataclasses
import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import keras

from kernels_pallas.sizes import Sizes
from kernels_xla.common import accelerator, nvidia
from kernels_xla.common.spec import Tensor

HOME = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flash-tf" / "pallas"  # noqa: TID251
SHARED = ("launching.py", "lower.py", "sizes.py")  # sources of every program
JAX, TENSORFLOW = "0.7.", "2.20."  # what was tried: an MLIR of this JAX is read by this TensorFlow
CHILD = f"""
import sys, jax
if not jax.__version__.startswith({JAX!r}):
    sys.exit("JAX " + jax.__version__)
sys.path.append(sys.argv[1])  # last, because that folder may have another JAX
from kernels_pallas.lower import main
main(*sys.argv[2:])
"""


def run(name: str, m: Sizes, *tensors: Tensor) -> list[Tensor]:
    """Runs a kernel; see `launching.launch`.

    Raises:
      ValueError: In TensorFlow, there is no program of the kernel, and no environment that can write it.
    """
    if keras.config.backend() == "jax":
        from kernels_pallas import launching

        return launching.launch(name, m, *tensors)
    return nvidia.call(_program(name, m), list(tensors), m.results(name))


def obstacle(names: list[str], m: Sizes) -> str | None:
    """What the kernels need here and what there is instead, or None if they run."""
    return machine_obstacle() or (None if keras.config.backend() == "jax" else _missing(tuple(names), m))


def machine_obstacle() -> str | None:
    """What every kernel needs of the machine and of the backend, and what there is instead, or None."""
    found = None if accelerator.traced_elsewhere() else nvidia.capability()
    if found is None or found < nvidia.HOPPER:
        got = "none" if found is None else ".".join(map(str, found))
        return f"an NVIDIA GPU of compute capability 9.0 or more, got {got}"
    if keras.config.backend() == "jax":
        import jax

        # XLA cannot cut a kernel's rows over devices, and would gather them on each.
        return None if jax.device_count() == 1 else f"a process with one device, got {jax.device_count()}"
    import tensorflow as tf

    devices = tf.distribute.get_strategy().extended.worker_devices if tf.distribute.has_strategy() else ()
    if others := [device for device in devices if ":GPU:" not in device]:
        return f"replicas on GPUs alone, got {others[0]}"
    return None if tf.__version__.startswith(TENSORFLOW) else f"TensorFlow {TENSORFLOW}x, got {tf.__version__}"


@functools.cache
def _missing(names, m):
    """Why there are no programs, or None. A failure is remembered too: each try starts a process."""
    try:
        programs(names, m)
    except (ValueError, OSError) as error:
        return str(error)
    return None


@functools.cache
def _program(name, m):
    return programs([name], m)[name].read_bytes()


def programs(names: Sequence[str], m: Sizes) -> dict[str, Path]:
    """The files with the kernels' programs, by name. Those that do not exist are written.

    Raises:
      ValueError: They cannot be written.
    """
    source = b"".join(Path(__file__).with_name(file).read_bytes() for file in (*SHARED, f"{m.module}.py"))
    key = hashlib.sha256(source + repr(m).encode()).hexdigest()[:16]
    found = {name: HOME / "programs" / f"{name}-{key}.mlir" for name in names}
    missing = {
        path.name: [name, type(m).__name__, dataclasses.asdict(m)] for name, path in found.items() if not path.exists()
    }
    if missing:
        _write(missing)
    return found


def _write(missing):
    python = HOME / "env" / "bin" / "python"
    if not python.exists():
        raise ValueError(f"JAX {JAX}0 in {HOME / 'env'}, as docs/layers.md says, got none")
    (HOME / "programs").mkdir(parents=True, exist_ok=True)
    parent = str(Path(__file__).parents[1])
    command = [python, "-I", "-c", CHILD, parent, HOME / "programs", json.dumps(missing)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise ValueError(f"JAX {JAX}0 in {HOME / 'env'} to lower them, got {said[0]}")
