"""Reads the trace of TensorFlow's profiler, from a CPU, GPUs or TPUs, into steps and operations."""

import collections
import dataclasses
import re
from collections.abc import Iterable

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from flash_tf.profiling import intervals, operations

DEVICE = re.compile(r"/device:(GPU|TPU):\d+")
WAITS = re.compile(r"IteratorGetNext\w*Op::\w*Compute")  # the time from asking for a batch to getting it
PROGRAMS, HOST = "/host:metadata", "/host:CPU"
PEAK = "peak_teraflops_per_second"  # some drivers state it for their device


@dataclasses.dataclass(frozen=True)
class Step:
    """A step's time in picoseconds: total = device + input + host.

    Attributes:
      number: The number in the step's mark.
      total: Time from the start on the host until the results were there.
      device: Time in which some device worked.
      input: Time in which no device worked and the step waited for its batch.
      host: The remaining time.
    """

    number: int
    total: int
    device: int
    input: int
    host: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """The steps and operations of a trace.

    Attributes:
      steps: The steps in order.
      devices: Number of accelerators that worked; 0 if the host's CPU did the work.
      operations: (what, kind) -> (count, picoseconds of its own), in all steps, on all devices together.
      program_bytes: Peak memory of the largest XLA program, by XLA's analysis; None without a program.
      peak: FLOP/s of one accelerator, if its plane states it; else None.
    """

    steps: tuple[Step, ...]
    devices: int
    operations: dict[tuple[str, str], tuple[int, int]]
    program_bytes: int | None
    peak: float | None


def load(paths: Iterable[str]) -> xplane_pb2.XSpace:
    """Reads a trace from its files, one for each host.

    Raises:
      ValueError: There is no file, or a file is no trace.
    """
    space, paths = xplane_pb2.XSpace(), list(paths)
    if not paths:
        raise ValueError("the profiler wrote no trace: it needs to write a *.xplane.pb file, got none")
    for path in paths:
        with tf.io.gfile.GFile(path, "rb") as file:
            try:
                space.MergeFromString(file.read())
            except DecodeError as error:
                raise ValueError(f"{path} is damaged: it is no XSpace") from error
    return space


def read(space: xplane_pb2.XSpace, name: str, per_mark: int = 1) -> Trace:
    """Steps and operations of a trace.

    Args:
      space: The trace.
      name: The name of the marks on its steps.
      per_mark: Steps of a mark, which has the number of the first. Each has the mean times of its mark.

    Raises:
      ValueError: It has no such step, or nothing ran in the steps.
    """
    planes = [_Plane(plane) for plane in space.planes]
    programs = operations.Programs({k: v for plane in planes if plane.name == PROGRAMS for k, v in plane.programs()})
    lines = [(plane, line) for plane in planes for line in plane.plane.lines if line.events]
    origin = min((line.timestamp_ns for _, line in lines), default=0)
    marks, waits, host, devices = {}, [], [], collections.defaultdict(list)
    for plane, line in lines:
        found = _Line(plane, line, origin, programs, name)
        marks.update(found.marks)
        waits += found.waits
        if DEVICE.fullmatch(plane.name):
            devices[plane.name] += [found] if plane.works(line) else []
        elif not line.name.startswith("tf_data"):  # its threads make later batches
            host.append(found)
    if not marks:
        raise ValueError(f"the trace has no step: it needs events {name!r} with a step_num, got none")
    work = [one for found in devices.values() for one in found if one.what]
    accelerators = sum(any(one.what for one in found) for found in devices.values())
    work = work or [one for one in host if one.what]
    if not work:
        raise ValueError(f"the trace is empty: nothing ran in its {len(marks)} steps {name!r}")
    busy = intervals.union(*((one.starts, one.ends) for one in work))
    waiting = intervals.merged(*zip(*waits, strict=True)) if waits else intervals.merged([], [])
    return Trace(
        steps=tuple(s for n in sorted(marks) for s in _steps(n, *marks[n], busy, waiting, per_mark)),
        devices=accelerators,
        operations=_operations(work, list(marks.values())),
        program_bytes=programs.largest(),
        peak=next((1e12 * p.stats[PEAK] for p in planes if DEVICE.fullmatch(p.name) and p.stats.get(PEAK)), None),
    )


def _steps(number, start, end, busy, waiting, count):
    device = intervals.length(busy, start, end)
    waited = intervals.length(intervals.union(busy, waiting), start, end) - device
    times = (end - start, device, waited, end - start - device - waited)
    return [Step(number + i, *(time // count for time in times)) for i in range(count)]


def _operations(work, spans):
    """Counts and times of the operations that begin in a step."""
    starts, ends = intervals.merged(*zip(*spans, strict=True))
    found = collections.defaultdict(lambda: (0, 0))
    for line in work:
        at = np.searchsorted(starts, line.starts, side="right") - 1
        inside = (at >= 0) & (line.starts < ends[np.maximum(at, 0)])
        for what, own in zip(
            [what for what, is_inside in zip(line.what, inside, strict=True) if is_inside],
            intervals.own(line.starts, line.ends)[inside].tolist(),
            strict=True,
        ):
            count, time = found[what]
            found[what] = count + 1, time + own
    return dict(found)


class _Plane:
    """A plane with its statistics by name."""

    def __init__(self, plane):
        self.plane, self.name = plane, plane.name
        self._names = {number: metadata.name for number, metadata in plane.stat_metadata.items()}
        self.stats = self.values(plane.stats)

    def values(self, stats):
        """Statistics as name -> value."""
        found = {}
        for stat in stats:
            field = stat.WhichOneof("value")
            value = getattr(stat, field) if field else None
            found[self._names.get(stat.metadata_id, "")] = self._names.get(value) if field == "ref_value" else value
        return found

    def programs(self):
        """Each program's `module(id)` and HLO."""
        for metadata in self.plane.event_metadata.values():
            for value in self.values(metadata.stats).values():
                if isinstance(value, bytes):
                    yield metadata.name, value

    def works(self, line):
        """Whether a device's line has operations: a GPU's streams, a TPU's "XLA Ops". Other lines repeat them."""
        streams = any(other.name.startswith("Stream") for other in self.plane.lines)
        return line.name.startswith("Stream") if streams else line.name == "XLA Ops"


class _Line:
    """The marks of steps, waits for input and operations of one thread or stream.

    Attributes:
      marks: Step -> its start and end.
      waits: Pairs (start, end).
      starts, ends, what: Start, end and (what, kind) of each operation.
    """

    def __init__(self, plane, line, origin, programs, mark):
        self._plane, self._programs, self._mark = plane, programs, mark
        self._device, self._kinds = bool(DEVICE.fullmatch(plane.name)), {}
        self.marks, self.waits, self.what, starts, ends = {}, [], [], [], []
        base = 1000 * (line.timestamp_ns - origin)
        for event in line.events:
            kind = self._kind(event)
            if kind is None:
                continue
            start, end = base + event.offset_ps, base + event.offset_ps + event.duration_ps
            if kind == "mark":
                self.marks[int(plane.values(event.stats)["step_num"])] = start, end
            elif kind == "wait":
                self.waits.append((start, end))
            else:
                self.what.append(kind)
                starts.append(start)
                ends.append(end)
        self.starts, self.ends = np.array(starts, np.int64), np.array(ends, np.int64)

    def _kind(self, event):
        """`mark`, `wait`, an operation as (what, kind), or None for anything else."""
        known = self._kinds.get(event.metadata_id, "new")
        if known == "new":
            known = self._kinds[event.metadata_id] = self._classified(event)
        if known != "xla":
            return known
        known = self._of_xla(event)
        if self._programs.few:
            self._kinds[event.metadata_id] = known
        return known

    def _classified(self, event):
        metadata = self._plane.plane.event_metadata[event.metadata_id]
        name, stats = metadata.name, self._plane.values([*metadata.stats, *event.stats])
        if name == self._mark and "step_num" in stats and not self._device:
            return "mark"
        if WAITS.fullmatch(name):
            return "wait"
        if "hlo_op" in stats:
            return "xla"
        if self._device:
            return self._on_device(name, stats)
        return operations.of_tensorflow(name) if operations.OP.fullmatch(name) else None

    def _on_device(self, name, stats):
        """An operation on a device, under the model's name for it if the driver states one."""
        scope = str(stats.get("tf_op") or "")
        if operations.OP.fullmatch(scope):
            return operations.of_tensorflow(scope)
        what, kind = operations.without_numbers(scope), stats.get("hlo_category")
        plain = operations.NUMBER.sub("", name.removeprefix("%").partition(" = ")[0])[: operations.LONGEST]
        return what or plain, str(kind or (plain if what else "kernel"))

    def _of_xla(self, event):
        """Several programs may have an instruction of the same name, so each event's program is looked up."""
        stats = self._plane.values([*self._plane.plane.event_metadata[event.metadata_id].stats, *event.stats])
        module, program = stats.get("hlo_module", ""), stats.get("program_id")
        return self._programs.operation(f"{module}({program})", str(stats["hlo_op"]))
