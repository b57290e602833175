"""Names of operations that people know from the model: layers are counted together, counters of loops left out."""

import re

from tensorflow.compiler.xla.service import hlo_pb2

# An operation of TensorFlow in a trace: name:Type. A function's call, `:__inference_…`, is around its operations.
OP = re.compile(r"[^\s:]+:_?[A-Za-z]\w*")
LOOPS = re.compile(
    r"(?:while|cond)/(?:body/_\d+/|true/_\d+/|false/_\d+/)?|replica_\d+/|jit\([^)]*\)/|StatefulPartitionedCall/"
)
NUMBER = re.compile(r"(?:[._]+\d+)+$")
LONGEST = 80  # characters of a kernel's name: templates of C++ have hundreds


def of_tensorflow(name: str) -> tuple[str, str]:
    """`while/body/_1/while/mixer_0_1/mixer_1/MatMul:_MklMatMul` -> (`mixer/MatMul`, `MatMul`)."""
    scope, _, kind = name.rpartition(":")
    return without_numbers(scope), kind.removeprefix("_Mkl").removeprefix("_")


def without_numbers(scope: str) -> str:
    """A scope without loops, replicas, numbers of layers and calls, and parts that repeat the last."""
    parts = [NUMBER.sub("", part) for part in LOOPS.sub("", scope).split("/")]
    kept = [part for i, part in enumerate(parts) if part and (i == 0 or part != parts[i - 1])]
    return "/".join(kept)[:LONGEST]


class Programs:
    """The programs of XLA that a trace brings.

    Args:
      protos: `module(id)` -> serialized `HloProto`.

    Attributes:
      few: Whether there is at most one, so that a name is of one instruction.
    """

    def __init__(self, protos: dict[str, bytes]):
        self._parsed = {name: hlo_pb2.HloProto.FromString(data) for name, data in protos.items()}
        self.few, self._named, self._ran = len(protos) < 2, {}, set()
        for program, proto in self._parsed.items():
            for computation in proto.hlo_module.computations:
                for instruction in computation.instructions:
                    known = instruction.metadata.op_name, instruction.opcode
                    self._named[program, instruction.name] = known
                    self._named.setdefault((program.partition("(")[0], instruction.name), known)

    def operation(self, program: str, name: str) -> tuple[str, str]:
        """What an instruction computes, by its scope in the model if it has one, and its opcode."""
        self._ran.add(program)
        known = self._named.get((program, name))
        if known is None:  # a driver that does not tell which of a module's programs it is
            known = self._named.get((program.partition("(")[0], name), ("", ""))
        scope, opcode = known
        plain = NUMBER.sub("", name.removeprefix("%")).removesuffix(".clone")
        plain = NUMBER.sub("", plain)
        return without_numbers(scope) or plain[:LONGEST], opcode or plain[:LONGEST]

    def largest(self) -> int | None:
        """Bytes that the largest of those asked for holds at its peak, by XLA's own analysis; None without one.

        A trace brings every program of the process, also those that did not run in it.
        """
        return max((memory(self._parsed[name]) for name in self._ran & self._parsed.keys()), default=None) or None


def memory_of(serialized: bytes) -> int:
    """`memory` of a serialized `HloProto`."""
    return memory(hlo_pb2.HloProto.FromString(serialized))


def memory(proto: hlo_pb2.HloProto) -> int:
    """Bytes of a program's arguments, results, constants and temporaries, as XLA lays them out."""
    return sum(a.size for a in proto.buffer_assignment.buffer_allocations if not a.is_thread_local)
