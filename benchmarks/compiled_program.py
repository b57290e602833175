"""Exported programs on a device, through JAX: compiled, fed, their variables kept. Needs NumPy and JAX alone."""

import contextlib
import gzip
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jaxlib import xla_client

from flash_tf.compiling import hlo, values
from flash_tf.compiling.manifest import Argument, Manifest, Program

HELD = ("weight", "slot", "seed", "state")  # roles of what stays on the device from step to step
GIB = 2**30


class DeviceMemoryError(ValueError):
    """The device has too little memory."""


class Compiled:
    """A program compiled for a device.

    Args:
      directory: The artifact's.
      program: What its manifest says of it.
      device: Where it runs.
      options: XLA's, name -> value, as `xla_gpu_enable_triton_gemm`: they hold for this program.

    Attributes:
      seconds: That it took to compile.
      bytes: Of arguments, results that take over no argument's memory, and temporaries.

    Raises:
      ValueError: When the file is missing, damaged or another program's, or the device has too little memory.
    """

    def __init__(self, directory: str, program: Program, device: jax.Device, options: dict[str, object] | None = None):
        self.program, self._device = program, device
        loaded = _load(Path(directory, program.file))
        arguments = tuple((argument.shape, np.dtype(argument.dtype)) for argument in program.arguments)
        if loaded.parameters != arguments or loaded.replaces != program.replaces:
            raise ValueError(f"{directory}/{program.file} is not the program of its manifest: export it again")
        asked = xla_client.CompileOptions()
        asked.env_option_overrides = list((options or {}).items())
        start = time.perf_counter()
        with memory_errors(device, f"{program.file} of {program.tokens:,} tokens"), _option_errors(options):
            client, devices = device.client, xla_client.DeviceList((device,))
            self._run = client.compile_and_load(loaded.bytecode, devices, asked)
        self.seconds = time.perf_counter() - start
        memory = self._run.get_compiled_memory_stats()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        self.bytes = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
        self._check_memory()

    def _check_memory(self):
        limit = (self._device.memory_stats() or {}).get("bytes_limit")
        if limit is not None and self.bytes > limit:
            raise DeviceMemoryError(
                f"{self.program.file} of {self.program.tokens:,} tokens needs {self.bytes / GIB:.2f} GiB, "
                f"{self._device.device_kind} has {limit / GIB:.2f} GiB for it"
            )

    def __call__(self, variables: dict[str, jax.Array], inputs: dict[str, jax.Array]) -> jax.Array:
        """Enqueues it; returns its first result, which is there later.

        Args:
          variables: What stays on the device, by name; what the program changes is replaced.
          inputs: All else, by name.
        """
        arguments = self.program.arguments
        given = [(variables if a.role in HELD else inputs)[a.name] for a in arguments]
        results = self._run.execute_sharded(given).disassemble_into_single_device_arrays()
        for result, argument in self.program.replaces.items():
            variables[arguments[argument].name] = results[result][0]
        return results[0][0]


def _load(path):
    """A program from its file, plain or gzipped: an artifact may be squeezed to travel."""
    zipped = path.with_name(f"{path.name}.gz")
    if not path.is_file() and not zipped.is_file():
        raise ValueError(f"{path} is missing from the artifact")
    try:
        return hlo.load(path.read_bytes() if path.is_file() else gzip.decompress(zipped.read_bytes()))
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


@contextlib.contextmanager
def memory_errors(device: jax.Device, what: str) -> Iterator[None]:
    """Turns an out-of-memory error into one line: who needed how much, and how much there was."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        asked = re.search(r"(\d+) ?bytes", str(error))
        size = f"{int(asked[1]) / GIB:,.2f} GiB more memory" if asked else "more memory"
        stats, there = device.memory_stats() or {}, ""
        if "bytes_limit" in stats:
            there = f": {stats['bytes_limit'] / GIB:,.2f} GiB, {stats['bytes_in_use'] / GIB:,.2f} GiB in use"
        raise DeviceMemoryError(f"{what} needs {size} than {device.device_kind} has{there}") from error


@contextlib.contextmanager
def _option_errors(options):
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if options and "INVALID_ARGUMENT" in str(error):
            raise ValueError(f"--xla-option: {' '.join(str(error).split())[:300]}") from error
        raise


def initial_variables(manifest: Manifest, program: Program, device: jax.Device) -> dict[str, jax.Array]:
    """The variables of a program at their first values, which are those that TensorFlow's check began with."""
    variables = {}
    for argument in program.arguments:
        if argument.role in HELD:
            value = values.initial(argument.name, argument.shape, argument.initializer, manifest.seed)
            variables[argument.name] = jax.device_put(value.astype(argument.dtype), device)
    return variables


def numbers_of_step(done: int, rate: float, device: jax.Device) -> dict[str, jax.Array]:
    """What a step takes beside its batch and its variables."""
    return {"step": jax.device_put(np.int64(done), device), "rate": jax.device_put(np.float32(rate), device)}


def batch_shapes(arguments: tuple[Argument, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the arguments that are a batch."""
    return {argument.name: argument.shape for argument in arguments if argument.role == "batch"}
