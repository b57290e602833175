"""XLA's cost analysis with loops counted. Imports jaxlib, whose private parts it uses, only when there is a loop."""

import re

from flash_tf.compiling import schedule
from flash_tf.compiling.tpu_loops import Loops


class LoopCosts:
    """XLA's cost analysis with loops counted: its own takes the body of each loop once."""

    def __init__(self, text: str, module: schedule.Module, loops: Loops):
        self._module, self._loops, self._blocks, name = module, loops, {}, None
        if any(one.opcode == "while" for c in module.computations.values() for one in c.values()):
            for line in text.splitlines():
                head = schedule.HEAD.match(line)
                name = head[2] if head else name
                if name is not None:
                    self._blocks.setdefault(name, []).append(line)

    def total(self, once: dict) -> dict:
        """`flops` and `bytes` of the whole program, from XLA's analysis of it."""
        more = self._more(self._module.entry)
        return {"flops": once["flops"] + more[0], "bytes": once["bytes accessed"] + more[1]}

    def _more(self, computation):
        """FLOPs and bytes that XLA leaves out: all passes of the loops but the first."""
        flops = moved = 0
        for one in self._module.computations[computation].values():
            if one.opcode == "while":
                body, passes = one.attribute("body"), self._loops.trips(computation, one)
                once, inside = self._once(body), self._more(body)
                added = [(passes - 1) * a + passes * b for a, b in zip(once, inside, strict=True)]
            elif one.opcode in ("call", "conditional", "async-start"):
                added = max((self._more(c) for c in one.called(*schedule.CALLEES)), key=sum, default=(0, 0))
            else:
                continue
            flops, moved = flops + added[0], moved + added[1]
        return flops, moved

    def _once(self, computation):
        """XLA's analysis of a computation as a program of its own."""
        import jax
        from jaxlib import _hlo, _jax

        needed = [computation]
        for name in needed:  # grows
            for one in self._module.computations[name].values():
                needed += [c for c in one.called("body", "condition", *schedule.CALLEES) if c not in needed]
        blocks = ["\n".join(self._blocks[name]) for name in reversed(needed[1:])]
        blocks.append("ENTRY " + "\n".join(self._blocks[computation]))
        # Stack frames are named by number in tables that stand before the first computation.
        text = re.sub(r" stack_frame_id=\d+", "", "\n".join(["HloModule alone", "", *blocks]))
        cost = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, _hlo.hlo_module_from_text(text))
        return cost["flops"], cost["bytes accessed"]
