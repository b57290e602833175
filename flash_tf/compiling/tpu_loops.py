"""How often the loops of a compiled program run.

XLA states it for some devices; for a TPU it does not. So a loop's counter is followed here from its first value
through the condition and the body, as long as it comes from constants alone.
"""

import operator
import re
from collections.abc import Callable

from flash_tf.compiling.schedule import BRANCHES, Instruction, Module

MOST = 1_000_000  # passes that are followed, at some 10 microseconds each

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


class _UnknownError(Exception):
    """A value that does not come from constants alone."""


class Loops:
    """Counts the passes of each loop of a module.

    Attributes:
      found: Name of each loop that was asked for -> its trip count.
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
          ValueError: When that depends on data, or changes from time to time; names the loop.
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
        """Values of a computation's parameters; in the body of a loop, those that no pass changes."""
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
        """Whether a pass gives on what it got at a place of its tuple."""
        instructions = self._module.computations[body]
        one = instructions[self._module.roots[body]]
        if one.opcode == "tuple" and path:
            one = instructions[one.operands[path[0]]]
        while one.opcode in UNCHANGED:
            one = instructions[one.operands[0]]
        taken = one.opcode == "get-tuple-element" and instructions[one.operands[0]].opcode == "parameter"
        return taken and path == (int(one.attribute("index")),)

    def _run(self, computation, loop, wanted, outside):
        """Runs a loop's counters; returns the number of passes and the last value at the place `wanted`."""
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
        """First values at the places that matter: what decides the next pass, what decides that, and so on."""
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
        """The number at a place of an instruction's result: `path` is () where that is no tuple."""
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
