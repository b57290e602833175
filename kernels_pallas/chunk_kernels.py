"""FLASH's core in Pallas, through Triton: kernels that read and write tensors as wide as the values.

A block of c + t rows holds a chunk's c tokens and, below them, t rows of its sums over other chunks:

    X = [V; S]     V = silu(v)               S = sum of K^T V over the chunks that the chunk reads
    Z = [G U; D]   U = silu(u), G = dY       D = sum of Q^T G U over the chunks that read the chunk

A `[c, c]` are the weights of a chunk's pairs, Q and K `[c, t]` its queries and keys across chunks. They have all masks.

    O = [A Q] X    Y = U O    dV = [A; K^T]^T Z    [dA dQ; dK^T .] = Z X^T

The last product is an einsum, outside. Y / u is O sigmoid(u), so the backward pass needs no O.

GAU is one chunk, the row, without sums: t is 0, X is V and Z is G U. `pair_kernels` has its A and dA.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.launching import Plan, sigmoid
from kernels_pallas.sizes import Chunks, block

NEAREST = 2.0**-60  # to 0 that u comes: Y / u then is O sigmoid(u) for every u
LOADS = 8  # chunks whose sums a program loads at once


def plan(name: str, m: Chunks, interpret: bool) -> Plan:
    """How a kernel runs.

    Args:
      name: "values": (p, bias, and K where t > 0) -> X. "gated": (p, bias, [A Q], X) -> Y. "gate_gradient": (p, bias,
        Y, dY) -> du in its columns of dp, Z without D, sums of du. "gate_sums": (Z, [A Q]) -> Z. "value_gradient": (p,
        bias, [A Q], Z, dp, and K where t > 0) -> dp with dv, sums of dv. "sums" and "sums_gradient": (X or Z, enters,
        leaves) -> the same tensor, with sums over chunks in place of each chunk's own; they follow "values" and
        "gate_sums" unless `summed_inside`. p `[tokens, 2e + s]` is the in-projection without its bias.
      m: Sizes.
      interpret: Whether Pallas' interpreter runs it.
    """
    kernel, grid, warps, stages = PLANS[name](m)
    kernel = functools.partial(kernel, m=m, sigmoid=sigmoid(m.dtype, interpret))
    return Plan(kernel, grid, warps, stages, IN_PLACE.get(name, {}))


def _away(u):
    return jnp.where(jnp.abs(u) < NEAREST, NEAREST, u)


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _parts(i, size):
    i, size = jnp.asarray(i, jnp.int32), jnp.int32(size)  # JAX with 64 bits counts loops in int64
    return lax.div(i, size), lax.rem(i, size)


def _wide(x):
    return x.astype(jnp.float32)


# One program of `values` and `gate_sums`: some columns, and all chunks of a row or one chunk, in blocks of tokens.


def _over_tokens(m, depth, step, carry, write, backward=False):
    """Runs `step(chunk, tokens, rows of the block, carry)` over the blocks, and `write(chunk, carry)` for each chunk.

    With `summed_inside`, `write` comes before a chunk's own blocks, so that it writes the sum over chunks before.
    """
    index, steps = pl.program_id(1), m.c // depth
    chunks = m.chunks if m.summed_inside else 1

    def one(i, carry):
        i = chunks * steps - 1 - i if backward else i
        chunk, at = _parts(i, steps)
        chunk = index * chunks + chunk
        if m.summed_inside:

            @pl.when(at == (steps - 1 if backward else 0))
            def _():
                write(chunk, carry)

        tokens = pl.ds(chunk * m.c + at * depth, depth)
        return step(tokens, pl.ds(chunk * m.depth + at * depth, depth), carry)

    carry = lax.fori_loop(0, chunks * steps, one, carry)
    if not m.summed_inside:
        write(index, carry)
    return carry


def _values(p, bias, k, x, *, m, sigmoid):
    cols = pl.ds(pl.program_id(0) * m.columns, m.columns)
    of_v = pl.ds(m.e + pl.program_id(0) * m.columns, m.columns)
    shift = bias[0, of_v][None]

    def step(tokens, rows, total):
        v = _wide(p[tokens, of_v]) + shift
        v = (v * sigmoid(v)).astype(x.dtype)
        x[rows, cols] = v
        return total + _dot(k[tokens, :].T, v)

    def write(chunk, total):
        x[pl.ds(chunk * m.depth + m.c, m.t), cols] = total.astype(x.dtype)

    _over_tokens(m, block(m.c, 64), step, jnp.zeros((m.t, m.columns), jnp.float32), write)


def _gate_sums(z_in, aq, z, *, m, sigmoid):
    del sigmoid
    cols = pl.ds(pl.program_id(0) * m.columns, m.columns)

    def step(tokens, rows, total):
        return total + _dot(aq[tokens, pl.ds(m.c, m.t)].T, z_in[rows, cols])

    def write(chunk, total):
        z[pl.ds(chunk * m.depth + m.c, m.t), cols] = total.astype(z.dtype)

    _over_tokens(m, block(m.c, 64), step, jnp.zeros((m.t, m.columns), jnp.float32), write, backward=True)


# One program of `values` where t is 0: some columns of a few tokens. As one of `gate_gradient`, it is elementwise.


def _activated(p, bias, x, *, m, sigmoid):
    rows, columns = _activated_tile(m)
    first, tokens = pl.program_id(0) * columns, pl.ds(pl.program_id(1) * rows, rows)
    of_v = pl.ds(m.e + first, columns)
    v = _wide(p[tokens, of_v]) + bias[0, of_v][None]
    x[tokens, pl.ds(first, columns)] = (v * sigmoid(v)).astype(x.dtype)


def _activated_tile(m):
    return block(m.c, 8), block(m.e, 512)


# One program of `gate_gradient`: a chunk, and twice the columns. It is elementwise, and many programs share an SM.


def _gate_gradient(p, bias, y, dy, dp, z, sums, *, m, sigmoid):
    depth, columns = block(m.c, 16), block(m.e, 128)
    cols, chunk = pl.ds(pl.program_id(0) * columns, columns), pl.program_id(1)
    shift = bias[0, cols][None]

    def step(i, added):
        tokens = pl.ds(chunk * m.c + i * depth, depth)
        u, g = _away(_wide(p[tokens, cols]) + shift), _wide(dy[tokens, cols])
        s = sigmoid(u)
        du = g * _wide(y[tokens, cols]) * (1.0 / u + 1.0 - s)  # g O silu'(u)
        dp[tokens, cols] = du.astype(dp.dtype)
        z[pl.ds(chunk * m.depth + i * depth, depth), cols] = (g * u * s).astype(z.dtype)
        return added + du

    added = lax.fori_loop(0, m.c // depth, step, jnp.zeros((depth, columns), jnp.float32))
    sums[chunk, cols] = jnp.sum(added, axis=0)


# One program of `gated` and `value_gradient`: a tile of a chunk's result.


def _tile(m):
    """A program's chunk, its tile of rows in the chunk, that tile in all tokens, and its first column."""
    tile, col = _parts(pl.program_id(0), m.e // m.columns)
    chunk, at = _parts(tile, m.c // block(m.c, 128))
    return chunk, at, tile, col * m.columns


def _product(m, steps, step):
    return lax.fori_loop(0, steps, step, jnp.zeros((block(m.c, 128), m.columns), jnp.float32))


def _gated(p, bias, aq, x, y, *, m, sigmoid):
    size, depth = block(m.c, 128), block(m.c | m.t, 64)
    chunk, at, tile, col = _tile(m)
    if m.causal:  # the tiles that see most first, so that the last programs are short
        tile, at = tile + m.c // size - 1 - 2 * at, m.c // size - 1 - at
    rows, cols = pl.ds(tile * size, size), pl.ds(col, m.columns)
    seen = (at + 1) * (size // depth)  # blocks of keys that a causal tile sees
    hidden = m.c // depth - seen if m.causal else 0

    def step(i, total):
        i = i + jnp.where(i < seen, 0, hidden) if m.causal else i
        return total + _dot(aq[rows, pl.ds(i * depth, depth)], x[pl.ds(chunk * m.depth + i * depth, depth), cols])

    out = _product(m, m.depth // depth - hidden, step)
    u = _away(_wide(p[rows, cols]) + bias[0, cols][None])
    y[rows, cols] = (u * sigmoid(u) * out).astype(y.dtype)


def _value_gradient(p, bias, aq, z, dp_in, *rest, m, sigmoid):
    del dp_in  # the same memory as dp
    *k, dp, sums = rest
    size, depth = block(m.c, 128), block(m.c | m.t, 64)
    chunk, at, tile, col = _tile(m)
    rows, cols, of_v = pl.ds(tile * size, size), pl.ds(col, m.columns), pl.ds(m.e + col, m.columns)
    hidden = at * (size // depth) if m.causal else 0  # blocks of queries that see nothing of a causal tile

    def across(i, total):
        sums = pl.ds(chunk * m.depth + m.c + i * depth, depth)
        return total + _dot(k[0][rows, pl.ds(i * depth, depth)], z[sums, cols])

    def inside(i, total):
        first = (i + hidden) * depth
        weights = aq[pl.ds(chunk * m.c + first, depth), pl.ds(at * size, size)]
        return total + _dot(weights.T, z[pl.ds(chunk * m.depth + first, depth), cols])

    v = p[rows, of_v]  # before the products, which hide the wait; `gated` gains nothing by that
    out = jnp.zeros((size, m.columns), jnp.float32)
    out = lax.fori_loop(0, m.t // depth, across, out) if m.t else out
    out = lax.fori_loop(0, m.c // depth - hidden, inside, out)
    v = _wide(v) + bias[0, of_v][None]
    s = sigmoid(v)
    dv = out * (s + v * s * (1.0 - s))
    dp[rows, of_v] = dv.astype(dp.dtype)
    sums[tile, cols] = jnp.sum(dv, axis=0)


# Sums over chunks in place, where a program of the kernels above takes one chunk.


def _sums(x_in, enters, leaves, x, *, m, sigmoid, gradient=False):
    """Writes y = enters carry, and goes on with carry = own + leaves y, chunk after chunk in the order of the sums."""
    del sigmoid
    (size, columns), loads = _sum_tile(m), block(m.chunks, LOADS)
    cols, first = pl.ds(pl.program_id(0) * columns, columns), pl.program_id(1) * size
    row = pl.program_id(2) * m.chunks
    order, _ = _parts(first, m.s)  # the order of the sums: "earlier" or "all", then "later"
    at = lambda chunk: pl.ds((row + chunk) * m.depth + m.c + first, size)  # noqa: E731

    def step(i, carry):
        chunks = [i * loads + j for j in range(loads)]
        backward = order == (0 if gradient else 1)
        chunks = [jnp.where(backward, m.chunks - 1 - chunk, chunk) for chunk in chunks]
        own = [_wide(x_in[at(chunk), cols]) for chunk in chunks]
        for chunk, added in zip(chunks, own, strict=True):
            if m.orders == ("all",):
                carry = carry + added
                continue
            seen = carry * enters[order, row + chunk]
            x[at(chunk), cols] = seen.astype(x.dtype)
            carry = added + seen * leaves[order, row + chunk]
        return carry

    def spread(chunk, carry):
        x[at(chunk), cols] = carry.astype(x.dtype)
        return carry

    total = lax.fori_loop(0, m.chunks // loads, step, jnp.zeros((size, columns), jnp.float32))
    if m.orders == ("all",):
        lax.fori_loop(0, m.chunks, spread, total)


def _sum_tile(m):
    return block(m.s, 4), block(m.e, 128)


# For each kernel, of the sizes: the function, its grid, and warps and stages of a program.
_TOKENS = lambda m: (m.e // m.columns, m.rows if m.summed_inside else m.rows * m.chunks)  # noqa: E731
_TILES = lambda m: (m.e // m.columns * (m.tokens // block(m.c, 128)),)  # noqa: E731
_ACTIVATED = lambda m: (m.e // _activated_tile(m)[1], m.tokens // _activated_tile(m)[0])  # noqa: E731
_SUMS = lambda m: (m.e // _sum_tile(m)[1], m.t // _sum_tile(m)[0], m.rows)  # noqa: E731
PLANS = {
    "values": lambda m: (_values, _TOKENS(m), 4, 3) if m.t else (_activated, _ACTIVATED(m), 4, 1),
    "gated": lambda m: (_gated, _TILES(m), 4 if m.t else 8, 3),
    "gate_gradient": lambda m: (_gate_gradient, (m.e // block(m.e, 128), m.rows * m.chunks), 4, 1),
    "gate_sums": lambda m: (_gate_sums, _TOKENS(m), 4, 3),
    "value_gradient": lambda m: (_value_gradient, _TILES(m), 4, 3),
    "sums": lambda m: (_sums, _SUMS(m), 1, 1),
    "sums_gradient": lambda m: (functools.partial(_sums, gradient=True), _SUMS(m), 1, 1),
}
IN_PLACE = {
    "gate_sums": {0: 0},
    "value_gradient": {4: 0},
    "sums": {0: 0},
    "sums_gradient": {0: 0},
}
