"""Reads the program that XLA compiled: what runs in what order, how often, and what the compiler expects it to cost.

Works on the text of an optimized HLO module and needs no library: `parse` gives its instructions, `walk` those that
run, with how often each does.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
BITS = re.compile(r"\d+")

BRANCHES = ("branch_computations", "true_computation", "false_computation")
CALLEES = ("calls", "to_apply", *BRANCHES)  # attributes that name computations, but for loops
NO_ESTIMATE = 2**63 - 1
BUFFERS = ("AllocateBuffer", "ConcatBitcast")  # custom calls that only name memory

# What an asynchronous pair does is in its start.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"),
    *("copy-done", "slice-done", "async-done", "async-update", "while", "conditional", "call"),
}


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape: `[b, n]` in memory space 0, HBM, or another, on the chip."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        size = 8 if self.dtype == "pred" else int((BITS.search(self.dtype) or "0")[0])
        return functools.reduce(int.__mul__, self.dims, size) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      name: Unique in its module.
      shape: As XLA writes it, with layouts.
      opcode: As `fusion`.
      operands: Names of instructions of the same computation.
      text: Everything after the opcode.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The result, an array or the arrays of a tuple."""
        return tuple(_array(*found) for found in ARRAY.findall(self.shape))

    @functools.cached_property
    def cycles(self) -> int | None:
        """The compiler's estimate of one run, None where it makes none: it writes the largest integer there too."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.text)
        return int(found[1]) if found and int(found[1]) < NO_ESTIMATE else None

    @property
    def op_name(self) -> str:
        """The operation of the traced program that it came from; empty where XLA made it."""
        return (re.search(r'op_name="([^"]*)"', self.text) or ("", ""))[1]

    @property
    def names_memory(self) -> bool:
        """Whether it does nothing when it runs."""
        return self.opcode == "custom-call" and any(f'"{name}"' in self.text for name in BUFFERS)

    def attribute(self, name: str) -> str | None:
        """An attribute that is a name, a number or a list, as `index` or `calls`."""
        found = re.search(rf"\b{name}=(\{{[^{{}}]*\}}|%?[\w.\-]+)", self.text)
        return found[1].lstrip("%") if found else None

    def called(self, *names: str) -> list[str]:
        """The computations that attributes of it name."""
        return [c for name in names for c in re.findall(r"[\w.\-]+", self.attribute(name) or "")]


@dataclasses.dataclass(frozen=True)
class Module:
    """A module's computations, name -> instruction name -> instruction in the order of the schedule."""

    entry: str
    computations: dict[str, dict[str, Instruction]]
    roots: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction that runs.

    Attributes:
      instruction: What.
      computation: Where it stands.
      times: How often in the whole program.
      beside: Whether it runs beside the rest, as transfers do.
    """

    instruction: Instruction
    computation: str
    times: int
    beside: bool


def _array(dtype, dims, layout):
    space = re.search(r"S\((\d+)\)", layout or "")
    return Array(dtype, tuple(int(d) for d in dims.split(",") if d), int(space[1]) if space else 0)


def parse(text: str) -> Module:
    """Reads an optimized module.

    Raises:
      ValueError: When the text has no entry computation.
    """
    entry, computations, roots, name = None, {}, {}, None
    for line in text.splitlines():
        head = HEAD.match(line)
        if head is not None:
            name = head[2]
            entry = name if head[1] else entry
            computations[name] = {}
        found = LINE.match(line) if head is None and name is not None else None
        if found is not None:
            one = Instruction(found[2], found[3], found[4], _operands(found[5]), found[5])
            computations[name][one.name] = one
            if found[1]:
                roots[name] = one.name
    if entry is None:
        raise ValueError("the compiled program's text has no entry computation")
    return Module(entry, computations, roots)


def _operands(text):
    return tuple(re.findall(r"%([\w.\-]+)", text.partition(")")[0]))


def walk(module: Module, trips: Callable[[str, Instruction], int]) -> Iterator[Step]:
    """Everything that runs, loops' bodies and branches in place of the loops and conditionals.

    A fusion is one instruction; the longer branch of a conditional stands for it.

    Args:
      module: The program.
      trips: (computation, its `while` instruction) -> how often the body runs each time the loop is reached.
    """
    yield from _inside(module, module.entry, 1, trips, beside=False)


def _inside(module, computation, times, trips, beside):
    for one in module.computations[computation].values():
        yield Step(one, computation, times, beside or one.opcode.endswith("-start"))
        if one.opcode == "while":
            passes = trips(computation, one)
            yield from _inside(module, one.attribute("condition"), times * (passes + 1), trips, beside)
            yield from _inside(module, one.attribute("body"), times * passes, trips, beside)
        elif one.opcode == "conditional":
            branches = [list(_inside(module, b, times, trips, beside)) for b in one.called(*BRANCHES)]
            yield from max(branches, key=cycles)
        elif one.opcode in ("call", "async-start") and one.cycles is None:
            for callee in one.called("calls", "to_apply"):
                yield from _inside(module, callee, times, trips, beside or one.opcode == "async-start")


def cycles(steps: list[Step]) -> int:
    """The compiler's estimates, summed over everything that runs."""
    return sum(step.times * (step.instruction.cycles or 0) for step in steps if step.instruction.opcode not in FREE)


def costliest(steps: list[Step], count: int = 10) -> list[dict]:
    """The instructions that take most of the estimated cycles; those alike, as in every layer, are one row.

    Returns:
      Rows of `name` (of the first), `count` (how often such instructions run), `kind`, `shape` (of the result),
      `operation` (of the traced program), `cycles` and `share` of all.
    """
    total, rows = cycles(steps), {}
    for step in steps:
        one = step.instruction
        if one.cycles is None or one.opcode in FREE:
            continue
        kind = one.attribute("kind") if one.opcode == "fusion" else None
        key = (one.opcode if kind is None else f"fusion {kind}", _short(one), readable(one.op_name))
        row = rows.setdefault(key, {"name": one.name, "count": 0, "cycles": 0})
        row["count"] += step.times
        row["cycles"] += step.times * one.cycles
    most = sorted(rows.items(), key=lambda item: -item[1]["cycles"])[:count]
    return [
        {**row, "kind": kind, "shape": shape, "operation": operation, "share": row["cycles"] / max(total, 1)}
        for (kind, shape, operation), row in most
    ]


def _short(one):
    """The arrays of a result without their layouts; tuples of many are cut."""
    arrays = [f"{a.dtype}[{','.join(map(str, a.dims))}]" for a in one.arrays]
    return " ".join(arrays[:4]) + (f" and {len(arrays) - 4} more" if len(arrays) > 4 else "")


def readable(op_name: str) -> str:
    """The path of an operation without the numbers that tell layers apart.

    `gradient_tape/model_1/mixer_3_1/MatMul_2` becomes `gradient of model/mixer/MatMul`.
    """
    path = re.sub(r"(_\d+)+(?=/|$)", "", op_name)
    gradient = path.removeprefix("gradient_tape/")
    return gradient if gradient == path else f"gradient of {gradient}"


def without_estimate(steps: list[Step], least: int = 2**16) -> list[Step]:
    """What runs without an estimate, of the instructions whose results have `least` bytes or more.

    The transfers that run beside the computation have none by design, and are left out.
    """
    return [
        step
        for step in steps
        for one in [step.instruction]
        if one.cycles is None and not (step.beside or one.opcode in FREE or one.names_memory)
        if sum(a.bytes for a in one.arrays) >= least
    ]
