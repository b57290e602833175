"""Where the time of an exported step goes on a GPU: its kernels by the model's operations, with bytes per second.

    python -m benchmarks.train_step --exported lm-flash-8192 --trace traces      # on the GPU, without TensorFlow
    python -m benchmarks.breakdown traces/lm-flash-8192.xplane.pb --device "NVIDIA H200"       # with TensorFlow

Bytes are the sizes of a kernel's arguments and results. They exceed the memory traffic if the kernel reads only a part,
or finds it in a cache. Kernels of all layers are summed. Kernels below --least milliseconds are summed as "others".
"""

import argparse
import collections
import gzip
import itertools
import math
import zlib
from pathlib import Path

import numpy as np

from benchmarks import device, result_files

COLUMNS, WIDTHS = ("operation", "kind", "result", "launches", "ms", "TB/s"), (58, 14, 30, 10, 10, 8)


def main(arguments: list[str] | None = None) -> int:
    """Prints each trace's table."""
    args = result_files.parse(_parser(), arguments)
    with device.libraries_in_log():
        traces = {
            path: _sums(path) for path in args.traces
        }  # so that a wrong file is refused before anything is printed
        results = result_files.Results(args, "breakdown", device=args.device, packages=("tensorflow",))
    for path, kernels in traces.items():
        rows = [row for row in kernels if row["ms"] >= args.least]
        rest = [row for row in kernels if row["ms"] < args.least]
        others = {"operation": "others", "kind": None, "result": None, "tb_per_s": None}
        rows.append({**others, "launches": sum(r["launches"] for r in rest), "ms": sum(r["ms"] for r in rest)})
        print(f"{path}: {sum(row['ms'] for row in rows):.1f} ms a step")
        print(device.table_line(COLUMNS, WIDTHS))
        for row in rows:
            results.add({"trace": Path(path).name.partition(".")[0], **row})
            rate = None if row["tb_per_s"] is None else f"{row['tb_per_s']:.2f}"
            cells = (row["operation"][:56], row["kind"], row["result"] and row["result"][:28], f"{row['launches']:.0f}")
            print(device.table_line((*cells, f"{row['ms']:.2f}", rate), WIDTHS))
    return 0


def _sums(path) -> list[dict]:
    """A row for each operation, the longest first: launches and milliseconds in a step, terabytes per second."""
    space = _space(path)
    program, known = _instructions(space)
    ran = collections.defaultdict(list)  # the duration of each run of an instruction's kernels, in picoseconds
    for module, name, time in itertools.chain.from_iterable(map(_kernels, space.planes)):
        if module == program and name in known:
            ran[name].append(time)
    if not ran:
        raise ValueError(f"{path} has no kernel of a program: it needs the trace of a GPU, without command buffers")
    steps, _ = collections.Counter(map(len, ran.values())).most_common(1)[
        0
    ]  # most instructions are one kernel, once a step
    sums = collections.defaultdict(lambda: np.zeros(3, np.int64))
    for name, times in ran.items():
        *what, size = known[name]
        sums[tuple(what)] += [len(times), sum(times), size * steps]
    return [
        {
            **dict(zip(("operation", "kind", "result"), what, strict=True)),
            "launches": launches / steps,
            "ms": time / steps / 1e9,
            "tb_per_s": size / time,  # bytes a picosecond
        }
        for what, (launches, time, size) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]


def _space(path):
    from google.protobuf.message import DecodeError
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    data = Path(path).read_bytes()
    try:
        return xplane_pb2.XSpace.FromString(gzip.decompress(data) if path.endswith(".gz") else data)
    except (DecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no trace: it needs an XSpace, which --trace writes") from error


def _instructions(space) -> tuple[str, dict[str, tuple[str, str, str, int]]]:
    """The largest program's name, and each instruction's scope, opcode, result, and bytes of arguments and result."""
    from tensorflow.compiler.xla.service import hlo_pb2

    from flash_tf.profiling.operations import without_numbers

    values = [s.bytes_value for p in space.planes for m in p.event_metadata.values() for s in m.stats]
    module = hlo_pb2.HloProto.FromString(max(values, key=len, default=b"")).hlo_module
    found = {}
    for computation in module.computations:
        by_id = {one.id: one for one in computation.instructions}
        for one in computation.instructions:
            size = sum(_bytes(x.shape) for x in (one, *(by_id[number] for number in one.operand_ids)))
            found[one.name] = without_numbers(one.metadata.op_name) or one.opcode, one.opcode, _text(one.shape), size
    return module.name, found


def _kernels(plane):
    """Each kernel's program, instruction and picoseconds, on a GPU's plane."""
    if not plane.name.startswith("/device:GPU"):
        return
    names = {number: metadata.name for number, metadata in plane.stat_metadata.items()}
    for event in (event for line in plane.lines if line.name.startswith("Stream") for event in line.events):
        stats = (*event.stats, *plane.event_metadata[event.metadata_id].stats)
        found = {names[stat.metadata_id]: stat.str_value or names.get(stat.ref_value) for stat in stats}
        yield found.get("hlo_module"), found.get("hlo_op"), event.duration_ps


def _bytes(shape) -> int:
    from tensorflow.compiler.xla import xla_data_pb2

    if shape.tuple_shapes:
        return sum(map(_bytes, shape.tuple_shapes))
    name = xla_data_pb2.PrimitiveType.Name(shape.element_type)
    bits = 8 if name == "PRED" else int("".join(filter(str.isdigit, name.partition("E")[0])) or 0)
    return math.prod(shape.dimensions) * bits // 8


def _text(shape) -> str:
    from tensorflow.compiler.xla import xla_data_pb2

    if shape.tuple_shapes:
        return _text(shape.tuple_shapes[0])  # a product's others are its workspace; a fusion's are alike
    name = xla_data_pb2.PrimitiveType.Name(shape.element_type).lower()
    return f"{name}[{','.join(map(str, shape.dimensions))}]"


def _parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breakdown", description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="an .xplane.pb file, or one gzipped")
    parser.add_argument("--device", default="unknown", help="the device that was traced, for the rows")
    parser.add_argument(
        "--least", type=float, default=0.3, metavar="MS", help="the shortest time that gets a line (default 0.3)"
    )
    result_files.add_options(parser)
    return parser


if __name__ == "__main__":
    device.program(main)
