"""The sizes of kernels, and the shapes of their arguments and results. It needs no library."""

import dataclasses
from typing import ClassVar

MULTIPROCESSORS = 132  # of an H100 or H200: fewer programs leave some without work

Shapes = list[tuple[tuple[int, ...], str]]  # each with a dtype


class Sizes:
    """What a kernel is compiled for. A subclass is a dataclass that JSON can write."""

    module: ClassVar[str]  # where in `kernels_pallas` its kernels are

    def arguments(self, name: str) -> Shapes:
        """Shapes and dtypes of a kernel's arguments."""
        raise NotImplementedError

    def results(self, name: str) -> Shapes:
        """Shapes and dtypes of a kernel's results."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Chunks(Sizes):
    """The sizes of FLASH's core, or GAU's.

    Attributes:
      rows: b.
      chunks: g, of a row; 1 for GAU.
      c: Tokens of a chunk.
      t: Rows of sums below a chunk: s for each order; 0 for GAU.
      e: Width of the values.
      s: Width of the shared representation z.
      dtype: Of all tensors but biases and their gradients, which are float32.
      causal: Whether A is lower triangular, so that blocks above the diagonal are not read.
      orders: Which chunks each s rows of S sum over: ("earlier",), ("all",), ("earlier", "later") or ().
      plain: Whether no document ends inside a row. Then a program can sum over the chunks of a row that it reads.
      turned: Whether each head is rotated.
      angled: Rows that have angles of their own: 1 if all have the same, or all.
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
    turned: tuple[bool, ...]
    angled: int

    module: ClassVar[str] = "chunk_kernels"

    @property
    def tokens(self) -> int:
        return self.rows * self.chunks * self.c

    @property
    def heads(self) -> "Heads":
        """The sizes of the kernels that make the heads."""
        positions = self.angled * self.chunks * self.c
        return Heads(self.tokens, positions, 2 * self.e, self.s, self.dtype, self.turned)

    @property
    def pairs(self) -> "Pairs":
        """The sizes of the kernels that make GAU's weights."""
        return Pairs(self.rows, self.c, self.e, self.s, self.dtype, self.causal)

    def cut(self, most: int) -> "Chunks":
        """The same tokens in chunks of at most so many, for a kernel that reads each token alone."""
        size = block(self.c, most)
        return dataclasses.replace(self, chunks=self.chunks * (self.c // size), c=size)

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
        return block(self.e, 64 if self.t else 128)

    def arguments(self, name: str) -> Shapes:
        p, y = ((self.tokens, self.width), self.dtype), ((self.tokens, self.e), self.dtype)
        bias, heads = ((1, 2 * self.e), "float32"), ((self.tokens, self.t), self.dtype)
        stacked = (self.rows * self.chunks * self.depth, self.e), self.dtype
        reads = (self.tokens, self.depth), self.dtype
        flags = [((2, self.rows * self.chunks), "float32")] * 2
        return {
            "values": [p, bias, *[heads] * bool(self.t)],
            "gated": [p, bias, reads, stacked],
            "gate_gradient": [p, bias, y, y],
            "gate_sums": [stacked, reads],
            "value_gradient": [p, bias, reads, stacked, p, *[heads] * bool(self.t)],
            "sums": [stacked, *flags],
            "sums_gradient": [stacked, *flags],
        }[name]

    def results(self, name: str) -> Shapes:
        stacked = (self.rows * self.chunks * self.depth, self.e), self.dtype
        gradient = (self.tokens, self.width), self.dtype
        return {
            "values": [stacked],
            "gated": [((self.tokens, self.e), self.dtype)],
            "gate_gradient": [gradient, stacked, ((self.rows * self.chunks, self.e), "float32")],
            "gate_sums": [stacked],
            "value_gradient": [gradient, ((self.tokens // block(self.c, 128), self.e), "float32")],
            "sums": [stacked],
            "sums_gradient": [stacked],
        }[name]


@dataclasses.dataclass(frozen=True)
class Pairs(Sizes):
    """The sizes of the weights of a row's pairs of tokens.

    Attributes:
      rows: b.
      n: Tokens of a row, a multiple of `TILE`.
      e: Width of the values.
      s: Width of queries and keys.
      dtype: Of all tensors but shares of the relative bias and factors, which are float32, and documents, int32.
      causal: Whether tiles above the diagonal are neither written nor read.
    """

    rows: int
    n: int
    e: int
    s: int
    dtype: str
    causal: bool

    module: ClassVar[str] = "pair_kernels"
    TILE: ClassVar[int] = 128  # queries and keys of a program

    @property
    def tiles(self) -> int:
        """Tiles along a row."""
        return self.n // self.TILE

    def arguments(self, name: str) -> Shapes:
        tokens = self.rows * self.n
        head, wide, number = ((tokens, self.s), self.dtype), ((tokens, self.e), self.dtype), ((tokens,), "float32")
        weights, relative = ((tokens, self.n), self.dtype), ((self.n, self.n), self.dtype)
        documents, sole = (((rows,), "int32") for rows in (tokens, self.rows * self.tiles))
        return {
            "weights": [head, head, relative, number, number, documents, sole],
            "weights_gradient": [wide, wide, weights, number],
            "relative_gradient": [weights, number],
            "query_gradient": [weights, head],
            "key_gradient": [weights, head],
        }[name]

    def results(self, name: str) -> Shapes:
        weights = (self.rows * self.n, self.n), self.dtype
        head = (self.rows * self.n, self.s), self.dtype
        return {
            "weights": [weights],
            "weights_gradient": [weights],
            "relative_gradient": [((self.n, self.n), "float32")],
            "query_gradient": [head],
            "key_gradient": [head],
        }[name]


@dataclasses.dataclass(frozen=True)
class Heads(Sizes):
    """The sizes of the heads that FLASH makes of its shared representation z.

    Attributes:
      tokens: Of all rows.
      positions: Tokens that have angles of their own: of one row or of all.
      first: The column of the in-projection where z begins; z is last.
      s: Width of z and of a head.
      dtype: Of the in-projection, the heads and their gradients; all else is float32.
      turned: Whether each head is rotated.
    """

    tokens: int
    positions: int
    first: int
    s: int
    dtype: str
    turned: tuple[bool, ...]

    module: ClassVar[str] = "head_kernels"
    STEP: ClassVar[int] = 128  # the most tokens that one program sums

    @property
    def half(self) -> int:
        return self.s // 2

    @property
    def columns(self) -> int:
        """Columns of a tile of half a head."""
        return block(self.half, 128)

    @property
    def step(self) -> int:
        """Tokens whose parts of the parameters' gradients one program sums."""
        return block(self.positions, self.STEP)

    def arguments(self, name: str) -> Shapes:
        p, head = ((self.tokens, self.first + self.s), self.dtype), ((self.tokens, self.s), self.dtype)
        of_heads, angles = ((len(self.turned), self.s), "float32"), [((self.positions, self.half), "float32")] * 2
        given = [p, ((self.s,), "float32"), of_heads]
        gradient = [*given, *angles, *[head] * len(self.turned), p]
        return {"heads": [*given, of_heads, *angles], "heads_gradient": gradient}[name]

    def results(self, name: str) -> Shapes:
        p, head = ((self.tokens, self.first + self.s), self.dtype), ((self.tokens, self.s), self.dtype)
        sums = (self.tokens // self.step, 2 * len(self.turned) + 1, self.s), "float32"
        return {"heads": [head] * len(self.turned), "heads_gradient": [p, sums]}[name]


@dataclasses.dataclass(frozen=True)
class Scan(Sizes):
    """The sizes of Mamba's scan.

    Attributes:
      rows: b.
      parts: Of a row, which run together.
      n: Tokens of a part, a multiple of `STEP`.
      e: Channels.
      s: States of a channel.
      dtype: Of x, b, c and the result; steps, decays, states and gradients are float32.
    """

    rows: int
    parts: int
    n: int
    e: int
    s: int
    dtype: str

    module: ClassVar[str] = "scan_kernels"
    STEP: ClassVar[int] = 8  # tokens between two states that the backward pass reads

    @property
    def tokens(self) -> int:
        return self.runs * self.n

    @property
    def runs(self) -> int:
        """Parts of all rows."""
        return self.rows * self.parts

    @property
    def programs(self) -> int:
        """Programs of a kernel."""
        return self.runs * (self.e // self.channels)

    @property
    def channels(self) -> int:
        """Channels of a program."""
        return block(self.e, 32)

    def arguments(self, name: str) -> Shapes:
        x, dt, a = (
            ((self.tokens, self.e), self.dtype),
            ((self.tokens, self.e), "float32"),
            ((self.s, self.e), "float32"),
        )
        narrow, on = ((self.tokens, self.s), self.dtype), ((self.tokens,), "float32")
        states = (self.runs, self.s, self.e), "float32"
        return {
            "scan_ends": [x, dt, a, narrow, on],
            "scan": [x, dt, a, narrow, narrow, on, states],
            "scan_starts": [dt, a, narrow, on, dt],
            "scan_states": [x, dt, a, narrow, on, states],
            "scan_gradient": [x, dt, a, narrow, narrow, on, dt, *self.results("scan_states"), states],
        }[name]

    def results(self, name: str) -> Shapes:
        wide = (self.tokens, self.e), "float32"
        narrow = (self.e // self.channels, self.tokens, self.s), "float32"
        states = (self.runs, self.s, self.e), "float32"
        return {
            "scan_ends": [states],
            "scan": [wide],
            "scan_starts": [states],
            "scan_states": [((self.tokens // self.STEP, self.s, self.e), "float32")],
            "scan_gradient": [wide, wide, states, narrow, narrow],
        }[name]


@dataclasses.dataclass(frozen=True)
class Decayed(Sizes):
    """The sizes of linear attention with decay.

    Attributes:
      rows: b.
      chunks: g, of a row, each of `CHUNK` tokens.
      heads: h.
      s: Width of a head's keys.
      e: Width of a head's values.
      shared: Whether all channels of a head's keys share one decay.
      dtype: Of queries, keys, values, states, weights of pairs and their gradients; log decays are float32.
    """

    rows: int
    chunks: int
    heads: int
    s: int
    e: int
    shared: bool
    dtype: str

    module: ClassVar[str] = "decay_kernels"
    CHUNK: ClassVar[int] = 64  # tokens, a power of 2

    @property
    def tokens(self) -> int:
        return self.rows * self.chunks * self.CHUNK

    @property
    def decays(self) -> int:
        """Decays of a token."""
        return self.heads if self.shared else self.heads * self.s

    @property
    def keys(self) -> int:
        """Columns of a tile of a head's keys."""
        return block(self.s, 64)

    @property
    def values(self) -> int:
        """Columns of a tile of a head's values."""
        return block(self.e, 64)

    def arguments(self, name: str) -> Shapes:
        key, value, decay, weights, states = self._shapes()
        return {
            "decays": [decay],
            "pairs": [key, key, decay],
            "added": [key, value, decay],
            "added_later": [key, value, decay],
            "entering": [states, decay],
            "entering_later": [states, decay],
            "decayed_sums": [key, value, decay, weights, states],
            "value_sums": [key, value, decay, weights, states],
            "pairs_gradient": [value, value, decay],
            "key_sums": [key, key, value, decay, value, states, states, weights],
        }[name]

    def results(self, name: str) -> Shapes:
        key, value, decay, weights, states = self._shapes()
        tiles = (self.s // self.keys, *decay[0]), "float32"
        return {
            "decays": [decay],
            "pairs": [weights],
            "added": [states],
            "added_later": [states],
            "entering": [states],
            "entering_later": [states],
            "decayed_sums": [value],
            "value_sums": [value],
            "pairs_gradient": [weights],
            "key_sums": [key, key, tiles if self.shared else decay],
        }[name]

    def _shapes(self):
        key, value = (self.tokens, self.heads * self.s), (self.tokens, self.heads * self.e)
        weights, states = (self.tokens, self.heads * self.CHUNK), (self.tokens // self.CHUNK * key[1], self.e)
        decay = (self.tokens, self.decays), "float32"
        return (key, self.dtype), (value, self.dtype), decay, (weights, self.dtype), (states, self.dtype)


@dataclasses.dataclass(frozen=True)
class Logits(Sizes):
    """The sizes of the loss of a head's logits.

    Attributes:
      tokens: Of a block, a multiple of `STEP`.
      vocabulary: V.
      dtype: Of the logits, the bias and the logits' gradient; labels, weights and sums are float32.
    """

    tokens: int
    vocabulary: int
    dtype: str

    module: ClassVar[str] = "logit_kernels"
    STEP: ClassVar[int] = 128  # tokens whose part of the bias's gradient one program sums

    @property
    def columns(self) -> int:
        """Columns of a program."""
        return block(self.vocabulary, 256)

    def arguments(self, name: str) -> Shapes:
        logits, of_token = ((self.tokens, self.vocabulary), self.dtype), ((self.tokens,), "float32")
        given = [logits, ((self.vocabulary,), self.dtype), of_token]
        return {"normalizers": given, "surplus": [*given, of_token, of_token]}[name]

    def results(self, name: str) -> Shapes:
        of_token = (self.tokens,), "float32"
        surplus = (self.tokens, self.vocabulary), self.dtype
        sums = (self.tokens // self.STEP, self.vocabulary), "float32"
        return {"normalizers": [of_token, of_token], "surplus": [surplus, sums]}[name]


@dataclasses.dataclass(frozen=True)
class Norm(Sizes):
    """The sizes of a norm of tokens.

    Attributes:
      tokens: Of the batch.
      width: d.
      dtype: Of the tokens and their gradients; parameters and their gradients are float32.
      centered: Whether the mean is subtracted, as in LayerNorm.
      epsilon: Added to the mean square.
    """

    tokens: int
    width: int
    dtype: str
    centered: bool
    epsilon: float

    module: ClassVar[str] = "norm_kernels"
    STEP: ClassVar[int] = 64  # the most tokens that one program sums

    @property
    def columns(self) -> int:
        """Columns of a tile. A program holds all tiles of its tokens."""
        return block(self.width, 1024)

    def rows(self, numbers: int) -> int:
        """Tokens of a program that holds so many numbers."""
        return block(self.tokens, 1 << max(0, (numbers // self.width).bit_length() - 1))

    @property
    def step(self) -> int:
        """Tokens whose parts of the parameters' gradients one program sums."""
        return block(self.tokens, self.STEP)

    def arguments(self, name: str) -> Shapes:
        x, parameter = ((self.tokens, self.width), self.dtype), ((self.width,), "float32")
        return {"normalized": [x, parameter, parameter], "norm_gradient": [x, parameter, x, x]}[name]

    def results(self, name: str) -> Shapes:
        x, sums = ((self.tokens, self.width), self.dtype), ((self.tokens // self.step, 2, self.width), "float32")
        return {"normalized": [x], "norm_gradient": [x, sums]}[name]


@dataclasses.dataclass(frozen=True)
class Glu(Sizes):
    """The sizes of a gated linear unit.

    Attributes:
      tokens: Of the batch.
      hidden: Width of a branch.
      activation: Of the gate: "gelu", "gelu_tanh" or "silu".
      dtype: Of the branches, the result and their gradients; the bias and its gradient are float32.
    """

    tokens: int
    hidden: int
    activation: str
    dtype: str

    module: ClassVar[str] = "glu_kernels"
    STEP: ClassVar[int] = 64  # the most tokens that one program sums

    @property
    def columns(self) -> int:
        """Columns of a program, in each branch."""
        return block(self.hidden, 256)

    @property
    def step(self) -> int:
        """Tokens whose parts of the bias's gradient one program sums."""
        return block(self.tokens, self.STEP)

    def arguments(self, name: str) -> Shapes:
        p, y = ((self.tokens, 2 * self.hidden), self.dtype), ((self.tokens, self.hidden), self.dtype)
        given = [p, ((2 * self.hidden,), "float32")]
        return {"glu": given, "glu_gradient": [*given, y]}[name]

    def results(self, name: str) -> Shapes:
        p, y = ((self.tokens, 2 * self.hidden), self.dtype), ((self.tokens, self.hidden), self.dtype)
        return {"glu": [y], "glu_gradient": [p, ((self.tokens // self.step, 2 * self.hidden), "float32")]}[name]


def block(size: int, most: int) -> int:
    """The largest power of 2 that divides `size`, but at most `most`."""
    return min(size & -size, most)
