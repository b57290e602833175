"""Times exported decoding on a device. Needs NumPy and JAX alone."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.compiled_program import Compiled, initial_variables, memory_errors
from flash_tf.compiling.manifest import Manifest

# Tokens of a row before a call, where the state does not grow with them. Both end a chunk of any usual size, so a call
# closes one: its 64 tokens pay in full for what is done once in 256 or 512.
CONTEXTS = 1024, 65_536
CALLS, WARM_UP = 10, 2


def measure(
    directory: str, manifest: Manifest, device: jax.Device, *, options: dict[str, object] | None = None
) -> Iterator[dict[str, Any]]:
    """Times calls after texts of each length, or up to the state's capacity if it has one.

    A time is the duration of a call, from its start to its tokens, divided by the tokens that a row gets. The weights
    have their initial values, and the state has random ones. Each call continues from the state that the call before
    left, with `position` set back.

    Args:
      directory: The artifact's.
      manifest: Its manifest.
      device: Where to run.
      options: XLA's.

    Yields:
      A row of a result for each context: what was run, `ms_per_token` (median) with its quartiles, `tokens_per_second`
      of all rows together, `compile_s`, `peak_bytes` (arguments, results that take over no argument's memory,
      temporaries), and `allocator_peak_bytes` of this process (None on a CPU).
    """
    program = manifest.programs["decode"]
    steps, capacity = program.sequence_length, program.capacity
    with memory_errors(device, f"{directory}/{program.file}"):
        decode = Compiled(directory, program, device, options)
        variables = initial_variables(manifest, program, device)
        _fill(variables, program, device)
        for context in CONTEXTS if capacity is None else (capacity - steps,):
            times = [1e3 * t / steps for t in _seconds(manifest, decode, variables, device, context)]
            low, median, high = statistics.quantiles(times, n=4)
            yield {
                "program": "decode",
                "model": manifest.name.split("/")[-1].removesuffix(".yaml"),
                "framework": "TensorFlow",
                "runner": "JAX",
                "config": manifest.name,
                "batch": program.batch_size,
                "context": context,
                "tokens": program.tokens,
                "precision": manifest.precision,
                "parameters": manifest.parameters,
                "xla_options": options or {},
                "compile_s": decode.seconds,
                "peak_bytes": decode.bytes,
                "allocator_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
                "calls": len(times),
                "ms_per_token": median,
                "quartiles_ms": [low, high],
                "tokens_per_second": program.batch_size / median * 1e3,
            }


def _fill(variables, program, device):
    """Random numbers for what a text leaves in the state: on zeros a GPU draws less power, and may run faster."""
    key = jax.random.key(0)
    with jax.default_device(device):
        for i, argument in enumerate(program.arguments):
            # Integers count, as positions do: theirs stay zero. bfloat16 is of no kind that NumPy knows.
            if argument.role == "state" and np.dtype(argument.dtype).kind not in "biu":
                drawn = jax.random.normal(jax.random.fold_in(key, i), argument.shape, np.dtype(argument.dtype))
                variables[argument.name] = drawn / 2


def _seconds(manifest, decode, variables, device, context):
    """Of each call after the warm-up."""
    rows = decode.program.batch_size
    positions = [jax.device_put(np.full(rows, context, np.int32), device) for _ in range(WARM_UP + CALLS)]
    inputs = {"token": jax.device_put(np.full(rows, manifest.ids["eos"], np.int32), device)}
    jax.block_until_ready((positions, inputs, variables))
    seconds = []
    for position in positions:
        variables["position"] = position  # a call takes its memory over, so each has its own
        start = time.perf_counter()
        decode(variables, inputs).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]
