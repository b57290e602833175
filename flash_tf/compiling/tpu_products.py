"""What the matrix unit spends on padding: each product's dimensions against the unit's tiles."""

import dataclasses
import functools
import re

from flash_tf.compiling.schedule import Instruction, Module, Step

ROWS = 8  # sublanes: the side of a product that streams through the unit is rounded up to this


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
        """FLOPs with the dimensions rounded up; the side that stays in the unit is the one that wastes less."""
        fixed = min(
            _up(self.rows, ROWS) * _up(self.columns, unit),
            _up(self.columns, ROWS) * _up(self.rows, unit),
        )
        return 2 * self.count * _up(self.inner, unit) * fixed


def _up(size, tile):
    return -(-size // tile) * tile


def padding_waste(module: Module, steps: list[Step], unit: int) -> float:
    """Share of the matrix unit's FLOPs that goes into padding, over all products that run; 0 without any.

    Args:
      module: The program.
      steps: What runs.
      unit: Rows and columns of the matrix unit.
    """
    useful = padded = 0
    for step in steps:
        for product in _products(module, step.computation, step.instruction):
            useful += step.times * product.flops
            padded += step.times * product.padded_flops(unit)
    return 1 - useful / padded if padded else 0.0


def _products(module, computation, one):
    """The products of an instruction, those of a fusion inside it included."""
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

    A batched product is one, with the batch as the image and a window that meets one element of it at each place.
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
    """(Place, window element) pairs that meet an element of an axis and neither padding nor a hole of dilation."""
    end = (length - 1) * holes + 1
    starts = range(-padding, -padding + places * stride, stride)
    return sum(
        0 <= start + i * spread < end and (start + i * spread) % holes == 0 for start in starts for i in range(size)
    )
