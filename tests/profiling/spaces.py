"""Traces written by hand in the format of TensorFlow's profiler; times are in microseconds."""

from tensorflow.tsl.profiler.protobuf import xplane_pb2

ORIGIN = 1_700_000_000_000_000_000  # ns: of a trace that counts from 1970


class Writer:
    """A trace that grows."""

    def __init__(self, origin=ORIGIN):
        self.space, self._origin = xplane_pb2.XSpace(), origin

    def plane(self, name, **stats):
        plane = self.space.planes.add(name=name)
        self._stats(plane, plane.stats, stats)
        return plane

    def line(self, plane, name, events, shift=0):
        """`events` are (name, start, duration, statistics); `shift` is the line's own beginning."""
        line = plane.lines.add(name=name, timestamp_ns=self._origin + 1000 * shift)
        for what, start, duration, stats in events:
            number = self._number(plane.event_metadata, what)
            event = line.events.add(metadata_id=number, offset_ps=10**6 * (start - shift), duration_ps=10**6 * duration)
            self._stats(plane, event.stats, stats)
        return line

    def steps(self, *spans, name="train", waits=()):
        """The host's plane: steps 1, 2, … as (start, duration), and waits for input alike."""
        host = self.plane("/host:CPU")
        marks = [(name, start, duration, {"step_num": i + 1}) for i, (start, duration) in enumerate(spans)]
        self.line(host, "python", [*marks, ("TFE_Py_Execute", spans[0][0], spans[0][1], {})])
        waited = [("IteratorGetNextOp::DoCompute", start, duration, {}) for start, duration in waits]
        self.line(host, "tf_data_iterator_get_next/1", waited)
        return host

    def _number(self, table, name):
        for number, metadata in table.items():
            if metadata.name == name:
                return number
        number = len(table) + 1
        table[number].id, table[number].name = number, name
        return number

    def _stats(self, plane, stats, values):
        for name, value in values.items():
            stat = stats.add(metadata_id=self._number(plane.stat_metadata, name))
            field = {str: "str_value", int: "int64_value", float: "double_value", bytes: "bytes_value"}[type(value)]
            setattr(stat, field, value)
