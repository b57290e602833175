"""What a compiled program costs: FLOPs and bytes with loops counted, traffic to HBM, padding of the matrix unit."""

import dataclasses
import functools
import re

from flash_tf.compiling import compiled_hlo
from flash_tf.compiling.compiled_hlo import FREE, Instruction, Loops, Module, Step

SLICES = {"dynamic-slice", "slice", "gather"}
LOOKED_THROUGH = {"bitcast", "convert", "reshape", "copy"}
ROWS = 8  # sublanes: a product's streaming side is rounded up to a multiple of this


class LoopCosts:
    """XLA's cost analysis with loops counted. XLA itself counts the body of each loop once.

    Uses private parts of jaxlib, and imports them only if there is a loop.
    """

    def __init__(self, text: str, module: Module, loops: Loops):
        self._module, self._loops, self._blocks, name = module, loops, {}, None
        if any(one.opcode == "while" for c in module.computations.values() for one in c.values()):
            for line in text.splitlines():
                head = compiled_hlo.HEAD.match(line)
                name = head[2] if head else name
                if name is not None:
                    self._blocks.setdefault(name, []).append(line)

    def total(self, once: dict) -> dict:
        """`flops` and `bytes` of the whole program, from XLA's analysis of it."""
        more = self._more(self._module.entry)
        return {"flops": once["flops"] + more[0], "bytes": once["bytes accessed"] + more[1]}

    def _more(self, computation):
        """FLOPs and bytes that XLA leaves out: all passes of the loops except the first."""
        flops = moved = 0
        for one in self._module.computations[computation].values():
            if one.opcode == "while":
                body, passes = one.attribute("body"), self._loops.trips(computation, one)
                once, inside = self._once(body), self._more(body)
                added = [(passes - 1) * a + passes * b for a, b in zip(once, inside, strict=True)]
            elif one.opcode in ("call", "conditional", "async-start"):
                added = max((self._more(c) for c in one.called(*compiled_hlo.CALLEES)), key=sum, default=(0, 0))
            else:
                continue
            flops, moved = flops + added[0], moved + added[1]
        return flops, moved

    def _once(self, computation):
        """XLA's analysis of one computation, compiled as a program."""
        import jax
        from jaxlib import _hlo, _jax

        needed = [computation]
        for name in needed:  # the list grows here
            for one in self._module.computations[name].values():
                needed += [c for c in one.called("body", "condition", *compiled_hlo.CALLEES) if c not in needed]
        blocks = ["\n".join(self._blocks[name]) for name in reversed(needed[1:])]
        blocks.append("ENTRY " + "\n".join(self._blocks[computation]))
        # Numbers of stack frames refer to tables before the first computation, which are not in this text.
        text = re.sub(r" stack_frame_id=\d+", "", "\n".join(["HloModule alone", "", *blocks]))
        cost = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, _hlo.hlo_module_from_text(text))
        return cost["flops"], cost["bytes accessed"]


def hbm_traffic(module: Module, steps: list[Step]) -> int:
    """Bytes that all instructions read from HBM and write to it. Each instruction reads each operand once.

    XLA's own count includes bytes that stay on the chip. On v4 most intermediate results of a step stay in the 128 MiB
    beside the cores, and take none of HBM's bandwidth.
    """
    return sum(step.times * _moved(module, step) for step in steps)


def _moved(module, step):
    one, computation = step.instruction, module.computations[step.computation]
    if one.opcode in FREE or one.opcode == "async-start" or one.names_memory:
        return 0
    if one.opcode in ("copy-start", "slice-start"):
        ends = one.arrays[:2]  # the copy is as large as the smaller one
        return sum(end.space == 0 for end in ends) * min(end.bytes for end in ends)
    operands = {name: i for i, name in enumerate(one.operands)}
    callee = one.attribute("calls") if one.opcode == "fusion" else None
    if callee is None:
        read = sum(_read(computation[name], _used_by(one, name)) for name in operands)
        return read + _written(one, [one], computation)
    inside = module.computations[callee]
    root = inside[module.roots[callee]]
    makers = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    used = {name: _used(inside, _parameter(inside, number)) for name, number in operands.items()}
    return sum(_read(computation[name], size) for name, size in used.items()) + _written(one, makers, inside)


def _parameter(inside, number):
    return next(o.name for o in inside.values() if o.opcode == "parameter" and o.text.startswith(f"{number})"))


def _read(operand, used):
    """Bytes of HBM that an operand's reader reads: `used` of them, or all if that is None."""
    whole = sum(a.bytes for a in operand.arrays if a.space == 0)
    return whole if used is None else min(whole, used)


def _used(inside, name):
    """Bytes of an array that a fusion reads if it only slices the array; None for all of it."""
    total = 0
    for user in (o for o in inside.values() if name in o.operands):
        used = _used(inside, user.name) if user.opcode in LOOKED_THROUGH else _used_by(user, name)
        if used is None:
            return None
        total += used
    return total if any(name in o.operands for o in inside.values()) else None


def _used_by(user: Instruction, name):
    """Bytes of the array `name` that one instruction reads; None for all of it."""
    if user.operands[0] != name or name in user.operands[1:]:
        return None
    if user.opcode in SLICES:
        return sum(a.bytes for a in user.arrays)
    return 0 if user.opcode == "dynamic-update-slice" else None  # it changes in place


def _written(one, makers, inside):
    """Bytes of HBM that an instruction writes. An update in place writes only the slice."""
    total = 0
    makers = makers * len(one.arrays) if len(makers) == 1 else makers  # one instruction may have several results
    for array, maker in zip(one.arrays, makers, strict=True):
        updated = maker.opcode == "dynamic-update-slice"
        changed = sum(a.bytes for a in inside[maker.operands[1]].arrays) if updated else array.bytes
        total += min(array.bytes, changed) if array.space == 0 else 0
    return total


@dataclasses.dataclass(frozen=True)
class Product:
    """`count` products of `[rows, inner]` and `[inner, columns]`."""

    count: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        return 2 * self.count * self.rows * self.inner * self.columns

    def padded_flops(self, unit: int) -> int:
        """FLOPs with the dimensions rounded up. The side that wastes less stays in the unit."""
        fixed = min(
            _up(self.rows, ROWS) * _up(self.columns, unit),
            _up(self.columns, ROWS) * _up(self.rows, unit),
        )
        return 2 * self.count * _up(self.inner, unit) * fixed


def _up(size, multiple):
    return -(-size // multiple) * multiple


def padding_waste(module: Module, steps: list[Step], unit: int) -> float:
    """Share of the matrix unit's FLOPs that is padding, over all products; 0 if there are none.

    Args:
      module: The program.
      steps: The instructions that run.
      unit: Side of the matrix unit.
    """
    useful = padded = 0
    for step in steps:
        for product in _products(module, step.computation, step.instruction):
            useful += step.times * product.flops
            padded += step.times * product.padded_flops(unit)
    return 1 - useful / padded if padded else 0.0


def _products(module, computation, one):
    """The products of an instruction, with the products inside a fusion."""
    if one.opcode == "fusion":
        callee = one.attribute("calls")
        return [p for o in module.computations[callee].values() for p in _products(module, callee, o)]
    if one.opcode not in ("dot", "convolution"):
        return []
    left, right = (module.computations[computation][name].arrays[0].dims for name in one.operands[:2])
    return [_dot(one, left, right) if one.opcode == "dot" else _convolution(one, left, right)]


def _dot(one: Instruction, left, right):
    contracted, batch = (_dimensions(one, f"lhs_{kind}_dims") for kind in ("contracting", "batch"))
    on_right = {*_dimensions(one, "rhs_contracting_dims"), *_dimensions(one, "rhs_batch_dims")}
    return Product(
        count=_size(left[i] for i in batch),
        rows=_size(d for i, d in enumerate(left) if i not in {*contracted, *batch}),
        inner=_size(left[i] for i in contracted),
        columns=_size(d for i, d in enumerate(right) if i not in on_right),
    )


def _dimensions(one, name):
    return [int(i) for i in re.findall(r"\d+", one.attribute(name) or "")]


def _size(dims):
    return functools.reduce(int.__mul__, dims, 1)


def _convolution(one: Instruction, left, right):
    """A convolution as products: one for each place of the window that meets data.

    XLA writes a batched product as a convolution: the batch is the image, and the window meets one element at a time.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.text)
    window = dict(re.findall(r"(\w+)=([\w\-]+)", one.attribute("window") or ""))
    result, places = one.arrays[0].dims, 1
    for axis in (a for a in labels[3] if a.isdigit()):
        options = {name: value.split("x")[int(axis)] for name, value in window.items()}
        places *= _meetings(left[labels[1].index(axis)], result[labels[3].index(axis)], *_window(options))
    return Product(
        count=places,
        rows=result[labels[3].index("b")],
        inner=right[labels[2].index("i")],
        columns=result[labels[3].index("f")],
    )


def _window(options):
    size, stride, spread, holes = (int(options.get(n, 1)) for n in ("size", "stride", "rhs_dilate", "lhs_dilate"))
    return size, stride, spread, holes, int(options.get("pad", "0_0").partition("_")[0])


@functools.cache
def _meetings(length, places, size, stride, spread, holes, padding):
    """Counts the pairs (place, window element) that meet data, neither padding nor a hole of dilation."""
    end = (length - 1) * holes + 1
    starts = range(-padding, -padding + places * stride, stride)
    return sum(
        0 <= start + i * spread < end and (start + i * spread) % holes == 0 for start in starts for i in range(size)
    )
