"""Compiles one program in its own process: libtpu reads its settings once, prints a lot, and may crash.

`python -m flash_tf.compiling.tpu_worker FOLDER [TOPOLOGY]` reads FOLDER/step.hlo.pb and writes FOLDER/result.json.
Without a topology it compiles for this machine's CPU. `flash_tf.compiling.tpu` starts it and reads the result.
"""

import collections
import ctypes
import glob
import json
import re
import signal
import sys

from flash_tf.compiling import compiled_hlo, tpu, tpu_costs
from flash_tf.compiling.compiled_hlo import Loops
from flash_tf.compiling.tpu_costs import LoopCosts

NEEDED = {"jax": "0.10", "libtpu": "0.0.51"}
INSTALL = "pip install 'flash-tf[aot]'"
PR_SET_PDEATHSIG = 1  # from prctl.h of Linux
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(folder: str, topology: str | None = None) -> None:
    """Compiles, and writes the result or `{"error": one line}`."""
    end_with_parent()
    try:
        _check_packages(["jax"] if topology is None else ["jax", "libtpu"])
        result = _on_cpu(folder) if topology is None else _on_tpu(folder, topology)
    except ValueError as error:
        result = {"error": str(error)}
    with open(f"{folder}/result.json", "w") as file:
        json.dump(result, file)


def end_with_parent() -> None:
    """Asks Linux to end this process when its parent ends, in whatever way: it holds gigabytes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _check_packages(names):
    import importlib

    needed = " and ".join(f"{name} {NEEDED[name]} or newer" for name in names)
    try:
        found = {name: importlib.import_module(name).__version__ for name in names}
    except ImportError as error:
        raise ValueError(f"this needs {needed} ({error}): {INSTALL}") from None
    numbers = lambda text: [int(n) for n in re.findall(r"\d+", text)[:3]]  # noqa: E731
    if any(numbers(found[name]) < numbers(NEEDED[name]) for name in names):
        has = ", ".join(f"{name} {version}" for name, version in found.items())
        raise ValueError(f"this needs {needed}, found {has}: {INSTALL}")


def _load(folder):
    from flash_tf.compiling import hlo

    with open(f"{folder}/step.hlo.pb", "rb") as file:
        return hlo.load(file.read())


def _on_cpu(folder):
    """FLOPs and bytes of the program as XLA compiles it for a CPU."""
    import jax
    from jaxlib import xla_client

    device, options = jax.devices("cpu")[0], xla_client.CompileOptions()
    debug = options.executable_build_options.debug_options
    debug.xla_backend_optimization_level, debug.xla_llvm_disable_expensive_passes = 0, True  # it is not going to run
    program = device.client.compile_and_load(_load(folder).bytecode, xla_client.DeviceList((device,)), options)
    text = program.hlo_modules()[0].to_string()
    module = compiled_hlo.parse(text)
    costs = LoopCosts(text, module, Loops(module))
    return {"hbm_bytes": _memory(program), **costs.total(program.cost_analysis())}


def _on_tpu(folder, topology):
    import jax

    device = tpu.find_device(topology)
    try:
        program = _compile(folder, device, topology)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            return {"problem": f"libtpu refuses the program: {' '.join(message.split())[:300]}"}
        return _too_large(folder, message)
    with open(_dumped(folder, "after_codegen.txt")) as file:
        text = file.read()
    module = compiled_hlo.parse(text)
    loops = Loops(module)
    steps = list(compiled_hlo.walk(module, loops.trips))
    unestimated = compiled_hlo.without_estimate(steps)
    counts = collections.Counter()
    for step in unestimated:
        counts[step.instruction.opcode] += step.times
    return {
        "hbm_bytes": _memory(program),
        **LoopCosts(text, module, loops).total(program.cost_analysis()),
        "hbm_traffic_bytes": tpu_costs.hbm_traffic(module, steps),
        "estimated_cycles": compiled_hlo.cycles(steps),
        "unestimated": dict(counts),
        "unestimated_traffic_bytes": tpu_costs.hbm_traffic(module, unestimated),
        "loops": [{"name": name, "trip_count": count} for name, count in loops.found.items()],
        "costliest": compiled_hlo.costliest(steps),
        "padding_waste": tpu_costs.padding_waste(module, steps, device.unit),
    }


def _compile(folder, device, topology):
    import jax
    import numpy as np
    from jax._src.interpreters import mlir
    from jax.experimental import topologies
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    program = _load(folder)
    config = {"chip_config_name": device.chip_config} if device.chip_config else {}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=device.layout, **config).devices
    except jax.errors.JaxRuntimeError as error:
        raise tpu.no_such_topology(topology) if "INVALID_ARGUMENT" in str(error) else error from None
    options = xla_client.CompileOptions()
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[0]]))
    # libtpu dumps the program itself: jaxlib has another version of XLA and cannot read every program of libtpu.
    options.executable_build_options.debug_options.xla_dump_to = f"{folder}/dump"
    options.executable_build_options.debug_options.xla_dump_hlo_as_text = True
    with mlir.make_ir_context():
        module = ir.Module.parse(program.bytecode)
    return devices[0].client.compile(module, xla_client.DeviceList(tuple(devices[:1])), options)


def _dumped(folder, name):
    """A dumped file of the whole program, which sorts before the files of the modules that XLA splits off."""
    found = sorted(glob.glob(f"{folder}/dump/module_*.{name}"))
    if not found:
        raise ValueError(f"libtpu wrote no {name}: this needs libtpu {NEEDED['libtpu']}, or a version close to it")
    return found[0]


def _memory(program):
    m = program.get_compiled_memory_stats()
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes + results + m.temp_size_in_bytes


def _too_large(folder, message):
    """The needed and available bytes, from libtpu's message, and the largest tensor, from its dump."""
    amounts = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", message)
    if amounts is None:
        return {"problem": f"out of memory: {' '.join(message.split())[:300]}"}
    needed, available = (round(float(amounts[i]) * UNITS[amounts[i + 1]]) for i in (1, 3))
    return {
        "hbm_bytes": needed,
        "problem": f"it needs {needed / 2**30:,.2f} GiB of HBM, but a program may use {available / 2**30:,.2f} GiB;"
        f" the largest tensor is {_largest(folder)}",
    }


def _largest(folder):
    with open(_dumped(folder, "after_optimizations-buffer-assignment.txt")) as file:
        found = re.findall(r"value: <\d+ ([\w.\-]+)(?:\{[\d,]*\})? @0> \(size=(\d+),\S*?\): (\S+?)[{\s]", file.read())
    with open(_dumped(folder, "after_optimizations.txt")) as file:
        computations = compiled_hlo.parse(file.read()).computations.values()
    size = max(int(size) for _, size, _ in found)
    alike = [(name, shape) for name, other, shape in found if int(other) == size]
    name, shape = alike[0]
    one = next((c[name] for c in computations if name in c), None)
    made = name if one is None else f"{one.opcode} {name}" + (f" of {one.op_name}" if one.op_name else "")
    more = f", one of {len(alike)} of this size" if len(alike) > 1 else ""
    return f"{shape}, {size / 2**30:,.2f} GiB, the result of {made}{more}"


if __name__ == "__main__":
    main(*sys.argv[1:])
