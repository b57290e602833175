"""Names of operations that people know from the model, without the numbers of layers and loops."""

import re

from tensorflow.compiler.xla.service import hlo_pb2

# An operation of TensorFlow in a trace: name:Type. The call of a function, `:__inference_…`, encloses its operations.
OP = re.compile(r"[^\s:]+:_?[A-Za-z]\w*")
LOOPS = re.compile(
    r"(?:while|cond)/(?:body/_\d+/|true/_\d+/|false/_\d+/)?|replica_\d+/|jit\([^)]*\)/|StatefulPartitionedCall/"
)
NUMBER = re.compile(r"(?:[._]+\d+)+$")
LONGEST = 80  # characters of a kernel's name: C++ templates have hundreds


def of_tensorflow(name: str) -> tuple[str, str]:
    """`while/body/_1/while/mixer_0_1/mixer_1/MatMul:_MklMatMul` -> (`mixer/MatMul`, `MatMul`)."""
    scope, _, kind = name.rpartition(":")
    return without_numbers(scope), kind.removeprefix("_Mkl").removeprefix("_")


def without_numbers(scope: str) -> str:
    """A scope without loops, replicas, numbers of layers and calls, and names that repeat the one before."""
    names = [NUMBER.sub("", name) for name in LOOPS.sub("", scope).split("/")]
    different = [name for i, name in enumerate(names) if name and (i == 0 or name != names[i - 1])]
    return "/".join(different)[:LONGEST]


class Programs:
    """The XLA programs in a trace.

    Args:
      protos: `module(id)` -> serialized `HloProto`.

    Attributes:
      few: Whether there is at most one program, so that a name belongs to one instruction.
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
        """An instruction's scope in the model, or its name if it has no scope, and its opcode."""
        self._ran.add(program)
        known = self._named.get((program, name))
        if known is None:  # some drivers do not tell the programs of a module apart
            known = self._named.get((program.partition("(")[0], name), ("", ""))
        scope, opcode = known
        plain = NUMBER.sub("", name.removeprefix("%")).removesuffix(".clone")
        plain = NUMBER.sub("", plain)
        return without_numbers(scope) or plain[:LONGEST], opcode or plain[:LONGEST]

    def largest(self) -> int | None:
        """Peak bytes of the largest program that `operation` was asked about, by XLA's analysis; None without one.

        A trace has every program of the process, also programs that did not run in it.
        """
        return max((memory(self._parsed[name]) for name in self._ran & self._parsed.keys()), default=None) or None


def memory_of(serialized: bytes) -> int:
    """The `memory` of a serialized `HloProto`."""
    return memory(hlo_pb2.HloProto.FromString(serialized))


def memory(proto: hlo_pb2.HloProto) -> int:
    """Bytes of a program's arguments, results, constants and temporaries in XLA's layout."""
    return sum(a.size for a in proto.buffer_assignment.buffer_allocations if not a.is_thread_local)
