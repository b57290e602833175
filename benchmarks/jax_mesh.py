"""Compiles the step of `strategy.type jax` for a mesh of TPUs, without one: the bytes of a device.

    python -m benchmarks.jax_mesh --topology v4:2x2x2 --mesh data=16 --mesh fsdp=16
    python -m benchmarks.jax_mesh --configs scale/flash_7b --set train.tokens_per_step=65536 --mesh fsdp=16

Weights are shapes alone, so that a model of any size is compiled. A device of v4 is one core, a device of v5p a chip.
A device receives what `exchanged_bytes` says in a step: the results of collectives, of an all-reduce twice.
"""

import argparse
import collections
import concurrent.futures
import importlib.metadata
import math
import multiprocessing
import os
import resource
import time

from benchmarks import device as devices
from benchmarks import result_files

COLUMNS = ("config", "mesh", "sequences", "state GiB", "HBM GiB", "GB to it", "compile s", "GiB here")
WIDTHS = (22, 20, 10, 10, 10, 10, 11, 10)
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    args = result_files.parse(_parser(), arguments)
    from flash_tf.compiling import tpu

    tpu.find_device(args.topology)
    os.environ.update(tpu.SETTINGS, KERAS_BACKEND="jax")  # noqa: TID251  of the processes that compile
    with devices.libraries_in_log():
        packages = ("keras", "jax", "libtpu")
        results = result_files.Results(args, "jax_mesh", device=args.topology, packages=packages)
        print(f"training steps compiled for {args.topology} by libtpu {importlib.metadata.version('libtpu')}")
        print(devices.table_line(COLUMNS, WIDTHS), flush=True)
        options = dict(one.split("=", 1) for one in args.option)
        for name in args.configs:
            for mesh in args.mesh or ["data=16"]:
                with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as compiler:
                    row = compiler.submit(_compiled, name, args.set, args.topology, mesh, options).result()
                results.add(row)
                print(_line(row), flush=True)
    return 0


def _compiled(name, overrides, topology, mesh, options):
    import jax
    import numpy as np

    from benchmarks import keras_step
    from flash_tf import config as configs
    from flash_tf.compiling import tpu
    from flash_tf.training import modelling
    from kernels_xla.common.accelerator import tracing_for

    device, config = tpu.find_device(topology), modelling.with_masking(configs.load(name, overrides))
    step = keras_step.make_step(config, _mesh(device, topology, mesh))
    rows, n = config.batch_size, config.data.sequence_length
    batch = {"tokens": (rows, n + (config.masking is None)), "window": (rows, 2)}
    batch = {key: jax.ShapeDtypeStruct(shape, np.int32, sharding=step.rows) for key, shape in batch.items()}
    start = time.perf_counter()
    with tracing_for("tpu"):
        lowered = step.run.lower(step.state, batch, jax.ShapeDtypeStruct((), np.uint32))
    row = {"config": name, "overrides": overrides, "mesh": mesh, "options": options, "sequences": rows, "n": n}
    row |= {"parameters": sum(math.prod(v.shape) for v in step.model.trainable_variables)}
    state = sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in step.state.values())
    try:
        program = lowered.compile(compiler_options=options or None)
    except Exception as error:  # of the compiler, whose types differ by version
        return {**row, "state_bytes": state, "error": " ".join(str(error).split())[:400], **_cost(start)}
    memory = program.memory_analysis()
    hbm = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        **row,
        "state_bytes": state,
        "hbm_bytes": hbm + memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "hbm_limit_bytes": device.hbm,
        **_cost(start),
        **_of_program(program, device.clock),
    }


def _cost(start):
    """The seconds since `start`, and the most memory that this process had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    return {"compile_s": time.perf_counter() - start, "compiler_bytes": peak}


def _of_program(program, clock):
    """The compiler's estimate of a step without its transfers, and the bytes that a device receives in it, by kind."""
    import jax

    from flash_tf.compiling import compiled_hlo

    try:
        module = compiled_hlo.parse(program.as_text())
    except jax.errors.JaxRuntimeError:  # jaxlib has another version of XLA, and cannot read every program of libtpu
        return {"estimated_s": None, "exchanged_bytes": None}
    steps = list(compiled_hlo.walk(module, compiled_hlo.Loops(module).trips))
    exchanged = collections.Counter()
    for step in steps:
        kind = step.instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            exchanged[kind] += step.times * _received(kind, step.instruction)
    return {"estimated_s": compiled_hlo.cycles(steps) / clock, "exchanged_bytes": dict(exchanged)}


def _received(kind, instruction):
    """The bytes of a collective's results. Some starts have operands before them, and words for the network after."""
    arrays = [array for array in instruction.arrays if array.dtype != "u32"]
    if kind == "all-reduce":
        return 2 * sum(array.bytes for array in arrays)
    return sum(array.bytes for array in arrays[len(arrays) // 2 if instruction.opcode.endswith("-start") else 0 :])


def _mesh(device, topology, text):
    """The mesh of a topology's devices that `AXIS=SIZE,...` names."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    from flash_tf.training.on_jax.mesh import AXES

    sizes = dict.fromkeys(AXES, 1) | {axis: int(size) for axis, size in (one.split("=") for one in text.split(","))}
    chip = {"chip_config_name": device.chip_config} if device.chip_config else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=device.layout, **chip).devices
    if math.prod(sizes.values()) != len(found):
        raise ValueError(f"--mesh must use each of the {len(found)} devices of {topology} once, got {text}")
    return Mesh(np.array(found).reshape(*sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _line(row):
    gib = lambda x: None if x is None else f"{x / 2**30:.2f}"  # noqa: E731
    cells = (row["config"], row["mesh"], row["sequences"], gib(row["state_bytes"]))
    here = (f"{row['compile_s']:.0f}", gib(row["compiler_bytes"]))
    if "error" in row:
        return f"{devices.table_line((*cells, None, None, *here), WIDTHS)}  {row['error'][:160]}"
    exchanged = row["exchanged_bytes"] and f"{sum(row['exchanged_bytes'].values()) / 1e9:.1f}"
    return devices.table_line((*cells, gib(row["hbm_bytes"]), exchanged, *here), WIDTHS)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jax_mesh", description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=["mlm_c4/flash"], metavar="CONFIG")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override an option")
    parser.add_argument("--topology", default="v4:2x2x2", help="as of `flash-tf compile`")
    parser.add_argument("--mesh", action="append", metavar="AXIS=SIZE,...", help="devices on each axis")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the compiler")
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    devices.program(main)
