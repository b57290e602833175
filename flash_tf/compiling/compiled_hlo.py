"""Reads a program that XLA compiled: its instructions in order, how often each runs, and its estimated cost.

Works on the text of an optimized HLO module and needs no library. `parse` gives all instructions. `walk` gives the ones
that run, with a count. `Loops` counts the passes of loops.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator

HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
BITS = re.compile(r"\d+")

BRANCHES = ("branch_computations", "true_computation", "false_computation")
CALLEES = ("calls", "to_apply", *BRANCHES)  # attributes that name computations, except of loops
NO_ESTIMATE = 2**63 - 1
BUFFERS = ("AllocateBuffer", "ConcatBitcast")  # custom calls that only name memory

# The cost of an asynchronous pair is counted at its start.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"),
    *("copy-done", "slice-done", "async-done", "async-update", "while", "conditional", "call"),
}

MOST = 1_000_000  # passes that `Loops` follows, at about 10 microseconds each

ARITHMETIC = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": lambda x: not x if isinstance(x, bool) else ~x,
    "negate": operator.neg,
    "select": lambda condition, yes, no: yes if condition else no,
}
COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
UNCHANGED = {"copy", "copy-start", "copy-done", "bitcast", "reshape", "convert", "broadcast", "opt-barrier"}
CALLS = {"fusion": "calls", "call": "to_apply"}

Lookup = Callable[[int, tuple[int, ...]], int]  # (parameter, place in its tuple) -> value


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape. Memory space 0 is HBM; the others are on the chip."""

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
      name: Its name, unique in the module.
      shape: Its shape in XLA's spelling, with layouts.
      opcode: For example `fusion`.
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
        """The compiler's estimate of one run; None without one, which it may also write as the largest integer."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.text)
        return int(found[1]) if found and int(found[1]) < NO_ESTIMATE else None

    @property
    def op_name(self) -> str:
        """The operation of the traced program that it came from; empty if XLA made it."""
        return (re.search(r'op_name="([^"]*)"', self.text) or ("", ""))[1]

    @property
    def names_memory(self) -> bool:
        """Whether it does nothing when it runs."""
        return self.opcode == "custom-call" and any(f'"{name}"' in self.text for name in BUFFERS)

    def attribute(self, name: str) -> str | None:
        """An attribute that is a name, a number or a list, for example `index` or `calls`."""
        found = re.search(rf"\b{name}=(\{{[^{{}}]*\}}|%?[\w.\-]+)", self.text)
        return found[1].lstrip("%") if found else None

    def called(self, *names: str) -> list[str]:
        """The computations that these attributes name."""
        return [c for name in names for c in re.findall(r"[\w.\-]+", self.attribute(name) or "")]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled module.

    Attributes:
      entry: Name of the computation that runs first.
      computations: Name -> instruction name -> instruction, in the order of the schedule.
      roots: Computation -> name of the instruction that is its result.
    """

    entry: str
    computations: dict[str, dict[str, Instruction]]
    roots: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction that runs.

    Attributes:
      instruction: The instruction.
      computation: Name of its computation.
      times: How often it runs in the whole program.
      beside: Whether it runs beside the others, as transfers do.
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
      ValueError: The text has no entry computation.
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
    """Yields every instruction that runs, also inside loops and conditionals.

    A fusion is one instruction. Of a conditional, the longer branch counts.

    Args:
      module: The program.
      trips: (computation, its `while` instruction) -> passes of the loop each time it is reached.
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
    """The compiler's estimate for everything that runs."""
    return sum(step.times * (step.instruction.cycles or 0) for step in steps if step.instruction.opcode not in FREE)


def costliest(steps: list[Step], count: int = 10) -> list[dict]:
    """The instructions with the most estimated cycles. Equal ones, as in every layer, share a row.

    Returns:
      Rows of `name` (the first instruction's), `count` (how often such instructions run), `kind`, `shape` (of the
      result), `operation` (of the traced program), `cycles` and `share` of all cycles.
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
    """The arrays of a result without their layouts; a long tuple is cut."""
    arrays = [f"{a.dtype}[{','.join(map(str, a.dims))}]" for a in one.arrays]
    return " ".join(arrays[:4]) + (f" and {len(arrays) - 4} more" if len(arrays) > 4 else "")


def readable(op_name: str) -> str:
    """The path of an operation without the numbers of layers.

    `gradient_tape/model_1/mixer_3_1/MatMul_2` becomes `gradient of model/mixer/MatMul`.
    """
    path = re.sub(r"(_\d+)+(?=/|$)", "", op_name)
    gradient = path.removeprefix("gradient_tape/")
    return gradient if gradient == path else f"gradient of {gradient}"


def without_estimate(steps: list[Step], least: int = 2**16) -> list[Step]:
    """The instructions that run without an estimate and whose results have `least` bytes or more.

    Transfers that run beside the computation never have an estimate, so they are left out.
    """
    return [
        step
        for step in steps
        for one in [step.instruction]
        if one.cycles is None and not (step.beside or one.opcode in FREE or one.names_memory)
        if sum(a.bytes for a in one.arrays) >= least
    ]


class _UnknownError(Exception):
    """A value that does not come from constants alone."""


class Loops:
    """Counts the passes of each loop of a module.

    XLA states the trip count for some devices, but not for a TPU. So this follows a loop's counter from its first value
    through the condition and the body. That works as long as the counter depends on constants alone.

    Attributes:
      found: Name of each loop that `trips` was asked about -> its trip count.
    """

    def __init__(self, module: Module):
        self._module = module
        self._callers = {}  # computation -> the computation and the instruction that run it
        for name, instructions in module.computations.items():
            for one in instructions.values():
                for callee in one.called("body", "to_apply", *BRANCHES):
                    self._callers[callee] = (name, one)
        self.found = {}

    def trips(self, computation: str, loop: Instruction) -> int:
        """How often the body of `loop`, an instruction of `computation`, runs each time the loop is reached.

        Raises:
          ValueError: The count depends on data, or changes from one time to the next. The message names the loop.
        """
        stated = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text)
        try:
            count = int(stated[1]) if stated else self._run(computation, loop, (), self._outside(computation))[0]
        except _UnknownError as error:
            where = f" ({loop.op_name})" if loop.op_name else ""
            raise ValueError(
                f"how often the loop {loop.name}{where} runs is not known when the program is compiled: {error}"
            ) from None
        self.found[loop.name] = count
        return count

    def _outside(self, computation) -> Lookup:
        """Values of a computation's parameters. In the body of a loop, only values that no pass changes."""
        if computation not in self._callers:
            return _refuse
        outer, caller = self._callers[computation]
        branch = caller.called(*BRANCHES).index(computation) + 1 if caller.opcode == "conditional" else 0

        def value(number, path):
            if caller.opcode == "while" and not self._passes_on(computation, path):
                raise _UnknownError(f"it changes with each pass of {caller.name}")
            return self._value(outer, caller.operands[branch or number], path, self._outside(outer))

        return value

    def _passes_on(self, body, path):
        """Whether a pass leaves one place of its tuple unchanged."""
        instructions = self._module.computations[body]
        one = instructions[self._module.roots[body]]
        if one.opcode == "tuple" and path:
            one = instructions[one.operands[path[0]]]
        while one.opcode in UNCHANGED:
            one = instructions[one.operands[0]]
        taken = one.opcode == "get-tuple-element" and instructions[one.operands[0]].opcode == "parameter"
        return taken and path == (int(one.attribute("index")),)

    def _run(self, computation, loop, wanted, outside):
        """Runs a loop's counters. Returns the number of passes and the last value at the place `wanted`."""
        condition, body = loop.attribute("condition"), loop.attribute("body")
        roots, passes = self._module.roots, 0
        state = first = self._first(computation, loop, wanted, outside)
        now = lambda _, path: state[path]  # noqa: E731
        while self._value(condition, roots[condition], (), now):
            before, passes = state, passes + 1
            state = {path: self._value(body, roots[body], path, now) for path in first}
            if state == before or passes > MOST:
                raise _UnknownError("its counters stand still" if state == before else f"more than {MOST:,} times")
        return passes, state.get(wanted)

    def _first(self, computation, loop, wanted, outside):
        """First values at the places that the condition depends on, directly or through a pass."""
        condition, body, found = loop.attribute("condition"), loop.attribute("body"), {}

        def ask(_, path):
            if path not in found:
                found[path] = self._value(computation, loop.operands[0], path, outside)
            return found[path]

        if wanted:
            ask(0, wanted)
        self._value(condition, self._module.roots[condition], (), ask)
        known = 0
        while known < len(found):
            known = len(found)
            for path in list(found):
                self._value(body, self._module.roots[body], path, ask)
        return found

    def _value(self, computation, name, path, outside):
        """The number at a place of an instruction's result; `path` is () if the result is no tuple."""
        one = self._module.computations[computation][name]
        at = lambda i, place=(): self._value(computation, one.operands[i], place, outside)  # noqa: E731
        if one.opcode == "parameter":
            return outside(int(one.text.partition(")")[0]), path)
        if one.opcode == "get-tuple-element":
            return at(0, (int(one.attribute("index")), *path))
        if one.opcode == "tuple" and path:
            return at(path[0], path[1:])
        if one.opcode in UNCHANGED:
            return at(0, path)
        if one.opcode == "while":
            return self._run(computation, one, path, outside)[1]
        if one.opcode in CALLS:
            callee = one.attribute(CALLS[one.opcode])
            return self._value(callee, self._module.roots[callee], path, at)
        return _number(one, at)


def _number(one, at):
    """The result of arithmetic on whole numbers and truth values."""
    dtypes = {(a.dtype, a.dims) for a in one.arrays}
    if not all(dtype[0] in "psu" and dims in ((), (1,)) for dtype, dims in dtypes):
        raise _UnknownError(f"{one.name} is {one.shape.partition('{')[0]}")
    if one.opcode == "constant":
        text = one.text.partition(")")[0].strip("{} ")
        return text == "true" if text in ("true", "false") else int(text)
    values = [at(i) for i in range(len(one.operands))]
    if one.opcode == "compare":
        return COMPARISONS[one.attribute("direction")](*values)
    if one.opcode not in ARITHMETIC:
        raise _UnknownError(f"it depends on {one.name}, a {one.opcode}")
    return ARITHMETIC[one.opcode](*values)


def _refuse(number, _):
    raise _UnknownError(f"it depends on argument {number} of the program")
