"""The sizes of the kernels in `chunk_kernels`, and the shapes of their arguments and results. It needs no library."""

import dataclasses

MULTIPROCESSORS = 132  # of an H100 or H200: fewer programs leave some without work


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a kernel is compiled for.

    Attributes:
      rows: b.
      chunks: g, of a row.
      c: Tokens of a chunk.
      t: Rows of sums below a chunk: s for each order.
      e: Width of the values.
      s: Width of the shared representation z.
      dtype: Of all tensors but biases and their gradients, which are float32.
      causal: Whether A is lower triangular, so that blocks above the diagonal are not read.
      orders: Which chunks each s rows of S sum over: ("earlier",), ("all",) or ("earlier", "later").
      plain: Whether no document ends inside a row. Then a program can sum over the chunks of a row that it reads.
    """

    rows: int
    chunks: int
    c: int
    t: int
    e: int
    s: int
    dtype: str
    causal: bool
    orders: tuple[str, ...]
    plain: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.chunks * self.c

    @property
    def depth(self) -> int:
        return self.c + self.t

    @property
    def width(self) -> int:
        return 2 * self.e + self.s

    @property
    def summed_inside(self) -> bool:
        """Whether one program takes all chunks of a row. Sums over chunks then cost no pass, but it takes rows."""
        return self.plain and self.orders == ("earlier",) and self.rows * (self.e // self.columns) >= MULTIPROCESSORS

    @property
    def columns(self) -> int:
        return block(self.e, 64)


def block(size: int, most: int) -> int:
    """The largest power of 2 that divides `size`, but at most `most`."""
    return min(size & -size, most)


def results(name: str, m: Sizes) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of a kernel's results."""
    stacked = (m.rows * m.chunks * m.depth, m.e), m.dtype
    gradient = (m.tokens, m.width), m.dtype
    return {
        "values": [stacked],
        "gated": [((m.tokens, m.e), m.dtype)],
        "gate_gradient": [gradient, stacked, ((m.rows * m.chunks, m.e), "float32")],
        "gate_sums": [stacked],
        "value_gradient": [gradient, ((m.tokens // block(m.c, 128), m.e), "float32")],
        "sums": [stacked],
        "sums_gradient": [stacked],
        "representation_gradient": [gradient],
    }[name]


def arguments(name: str, m: Sizes) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of a kernel's arguments."""
    p, y = ((m.tokens, m.width), m.dtype), ((m.tokens, m.e), m.dtype)
    bias, heads = ((1, 2 * m.e), "float32"), ((m.tokens, m.t), m.dtype)
    stacked = (m.rows * m.chunks * m.depth, m.e), m.dtype
    joined = ((m.tokens, m.depth), m.dtype), ((m.rows * m.chunks * m.depth, m.c), m.dtype)
    flags = [((2, m.rows * m.chunks), "float32")] * 2
    return {
        "values": [p, bias, heads],
        "gated": [p, bias, joined[0], stacked],
        "gate_gradient": [p, bias, y, y],
        "gate_sums": [stacked, heads],
        "value_gradient": [p, bias, joined[1], stacked, p],
        "sums": [stacked, *flags],
        "sums_gradient": [stacked, *flags],
        "representation_gradient": [((m.tokens, m.s), m.dtype), p],
    }[name]
