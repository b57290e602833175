"""GAU's weights of pairs in Pallas, through Triton: squared ReLU of scores, and the gradients of what makes them.

For a row, where query i sees key j, and 0 elsewhere:

    S[i, j] = q[i] . k[j] + share[i] relative[i, j]     A = (factor[i] relu(S))^2
    dS = 2 factor sqrt(A) (Z V^T)     dQ = dS K     dK = dS^T Q     drelative = sum of share dS over rows

Z is the gradient of the attended values. A and dS are written in tiles. In causal rows, tiles above the diagonal are
not written, and nothing reads them.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.launching import Plan
from kernels_pallas.sizes import Pairs, block


def plan(name: str, m: Pairs, interpret: bool) -> Plan:
    """How a kernel runs.

    Args:
      name: "weights": (q, k, relative bias, shares, factors, documents, sole documents of tiles or 0) -> A.
        "weights_gradient": (Z, V, A, factors) -> dS. "relative_gradient": (dS, shares) -> the relative bias's gradient,
        float32. "query_gradient": (dS, K) -> dQ. "key_gradient": (dS, Q) -> dK.
      m: Sizes.
      interpret: Whether Pallas' interpreter runs it.
    """
    del interpret
    kernel, grid, warps, stages = PLANS[name](m)
    return Plan(functools.partial(kernel, m=m), grid, warps, stages)


def _wide(x):
    return x.astype(jnp.float32)


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


# One program of `weights` and of `weights_gradient`: a tile of pairs.


def _tiles(m):
    """Programs of all tiles that are written. Two rows of a triangle, as far from its ends, share an axis."""
    return (m.tiles + 1, (m.tiles + 1) // 2) if m.causal else (m.tiles, m.tiles)


def _tile(m):
    """A program's tile of queries and its tile of keys, in a row."""
    j, i = pl.program_id(0), pl.program_id(1)
    if m.causal:
        last = m.tiles - 1 - i  # has the keys up to itself; row i has the rest
        i, j = jnp.where(j <= last, last, i), jnp.where(j <= last, j, j - last - 1)
    return i, j


def _weights(q, k, relative, shares, factors, documents, sole, a, *, m):
    (i, j), row = _tile(m), pl.program_id(2)
    own, other = sole[row * m.tiles + i], sole[row * m.tiles + j]
    whole = (own == other) & (own > 0)
    whole = whole & (i > j) if m.causal else whole
    i, j = i * m.TILE, j * m.TILE
    queries, keys, there = pl.ds(row * m.n + i, m.TILE), pl.ds(row * m.n + j, m.TILE), pl.ds(j, m.TILE)
    added = shares[queries][:, None] * _wide(relative[pl.ds(i, m.TILE), pl.ds(j, m.TILE)])
    root = factors[queries][:, None] * jnp.maximum(_dot(q[queries, :], k[keys, :].T) + added, 0.0)
    weights = root * root

    @pl.when(whole)  # most tiles; masks would take a sixth of the time
    def _():
        a[queries, there] = weights.astype(a.dtype)

    @pl.when(jnp.logical_not(whole))
    def _():
        of_key = documents[keys][None]
        seen = (documents[queries][:, None] == of_key) & (of_key > 0)
        if m.causal:
            at = lax.iota(jnp.int32, m.TILE)
            seen &= i + at[:, None] >= j + at[None]
        a[queries, there] = jnp.where(seen, weights, 0.0).astype(a.dtype)


def _weights_gradient(z, v, a, factors, ds, *, m):
    (i, j), row, depth = _tile(m), pl.program_id(2), block(m.e, 64)
    queries, keys = pl.ds(row * m.n + i * m.TILE, m.TILE), pl.ds(row * m.n + j * m.TILE, m.TILE)

    def step(at, total):
        cols = pl.ds(at * depth, depth)
        return total + _dot(z[queries, cols], v[keys, cols].T)

    da = lax.fori_loop(0, m.e // depth, step, jnp.zeros((m.TILE, m.TILE), jnp.float32))
    there = pl.ds(j * m.TILE, m.TILE)
    ds[queries, there] = (2.0 * factors[queries][:, None] * da * jnp.sqrt(_wide(a[queries, there]))).astype(ds.dtype)


# One program of `relative_gradient`: a strip of a tile, in all rows.

STRIP, LOADS = 16, 8  # queries of a program, and rows that it loads at once


def _relative_gradient(ds, shares, drelative, *, m):
    (i, j), loads = _tile(m), block(m.rows, LOADS)
    i, keys = i * m.TILE + pl.program_id(2) * STRIP, pl.ds(j * m.TILE, m.TILE)

    def step(at, total):
        queries = [pl.ds((at * loads + row) * m.n + i, STRIP) for row in range(loads)]
        given = [(ds[one, keys], shares[one]) for one in queries]
        for part, share in given:
            total += _wide(part) * share[:, None]
        return total

    total = lax.fori_loop(0, m.rows // loads, step, jnp.zeros((STRIP, m.TILE), jnp.float32))
    drelative[pl.ds(i, STRIP), keys] = total


# One program of `query_gradient` and `key_gradient`: some tokens of a row.

DEPTH = 64  # tokens that a program sums over at a time
QUERIES, KEYS = 64, 128  # tokens of a program


def _query_gradient(ds, k, dq, *, m):
    at, row = m.n // QUERIES - 1 - pl.program_id(0), pl.program_id(1)  # those that see most first
    rows = pl.ds(row * m.n + at * QUERIES, QUERIES)

    def step(i, total):
        return total + _dot(ds[rows, pl.ds(i * DEPTH, DEPTH)], k[pl.ds(row * m.n + i * DEPTH, DEPTH), :])

    steps = (at + 1) * (QUERIES // DEPTH) if m.causal else m.n // DEPTH
    dq[rows, :] = lax.fori_loop(0, steps, step, jnp.zeros((QUERIES, m.s), jnp.float32)).astype(dq.dtype)


def _key_gradient(ds, q, dk, *, m):
    at, row = pl.program_id(0), pl.program_id(1)
    first = at * (KEYS // DEPTH) if m.causal else 0

    def step(i, total):
        queries = pl.ds(row * m.n + (first + i) * DEPTH, DEPTH)
        return total + _dot(ds[queries, pl.ds(at * KEYS, KEYS)].T, q[queries, :])

    total = lax.fori_loop(0, m.n // DEPTH - first, step, jnp.zeros((KEYS, m.s), jnp.float32))
    dk[pl.ds(row * m.n + at * KEYS, KEYS), :] = total.astype(dk.dtype)


# For each kernel, of the sizes: the function, its grid, and warps and stages of a program.
PLANS = {
    "weights": lambda m: (_weights, (*_tiles(m), m.rows), 8, 1),
    "weights_gradient": lambda m: (_weights_gradient, (*_tiles(m), m.rows), 8, 3),
    "relative_gradient": lambda m: (_relative_gradient, (*_tiles(m), m.TILE // STRIP), 4, 1),
    "query_gradient": lambda m: (_query_gradient, (m.n // QUERIES, m.rows), 4, 3),
    "key_gradient": lambda m: (_key_gradient, (m.n // KEYS, m.rows), 4, 3),
}
