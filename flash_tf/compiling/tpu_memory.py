"""Bytes that a compiled program moves to and from HBM.

XLA's own count of bytes also has those that stay on the chip: on v4 most of a step's intermediate results live in the
128 MiB beside the cores, and no bandwidth of HBM is spent on them.
"""

from flash_tf.compiling.schedule import FREE, Instruction, Module, Step

SLICES = {"dynamic-slice", "slice", "gather"}
LOOKED_THROUGH = {"bitcast", "convert", "reshape", "copy"}


def hbm_traffic(module: Module, steps: list[Step]) -> int:
    """Bytes read from HBM and written to it by all that runs, each operand once an instruction."""
    return sum(step.times * _moved(module, step) for step in steps)


def _moved(module, step):
    one, computation = step.instruction, module.computations[step.computation]
    if one.opcode in FREE or one.opcode == "async-start" or one.names_memory:
        return 0
    if one.opcode in ("copy-start", "slice-start"):
        ends = one.arrays[:2]  # what is copied is as large as the smaller
        return sum(end.space == 0 for end in ends) * min(end.bytes for end in ends)
    operands = {name: i for i, name in enumerate(one.operands)}
    callee = one.attribute("calls") if one.opcode == "fusion" else None
    if callee is None:
        return sum(_read(computation[name], _part(one, name)) for name in operands) + _written(one, [one], computation)
    inside = module.computations[callee]
    root = inside[module.roots[callee]]
    makers = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    parts = {name: _parts(inside, _parameter(inside, number)) for name, number in operands.items()}
    return sum(_read(computation[name], part) for name, part in parts.items()) + _written(one, makers, inside)


def _parameter(inside, number):
    return next(o.name for o in inside.values() if o.opcode == "parameter" and o.text.startswith(f"{number})"))


def _read(operand, part):
    """Of an operand that is only sliced, the slices."""
    whole = sum(a.bytes for a in operand.arrays if a.space == 0)
    return whole if part is None else min(whole, part)


def _parts(inside, name):
    """Bytes of an array that a fusion reads, None for all."""
    total = 0
    for user in (o for o in inside.values() if name in o.operands):
        part = _parts(inside, user.name) if user.opcode in LOOKED_THROUGH else _part(user, name)
        if part is None:
            return None
        total += part
    return total if any(name in o.operands for o in inside.values()) else None


def _part(user: Instruction, name):
    """Bytes of the array `name` that one instruction reads, None for all."""
    if user.operands[0] != name or name in user.operands[1:]:
        return None
    if user.opcode in SLICES:
        return sum(a.bytes for a in user.arrays)
    return 0 if user.opcode == "dynamic-update-slice" else None  # changed where it stands


def _written(one, makers, inside):
    """Of a result that an update changes where it stands, the update."""
    total = 0
    makers = makers * len(one.arrays) if len(makers) == 1 else makers  # one instruction may have several results
    for array, maker in zip(one.arrays, makers, strict=True):
        updated = maker.opcode == "dynamic-update-slice"
        part = sum(a.bytes for a in inside[maker.operands[1]].arrays) if updated else array.bytes
        total += min(array.bytes, part) if array.space == 0 else 0
    return total
