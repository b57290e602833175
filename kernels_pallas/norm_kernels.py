"""A norm and its gradient in Pallas, through Triton: one pass each, where XLA takes three.

A program holds all columns of a few tokens, as tiles, because Triton needs powers of 2.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.launching import Plan
from kernels_pallas.sizes import Norm

Tiles = list[jax.Array]
NUMBERS = 768  # of x that a program takes at a time


def plan(name: str, m: Norm, interpret: bool) -> Plan:
    """How a kernel runs.

    Args:
      name: "normalized": (x, gamma, beta) -> the norm of x. "norm_gradient": (x, gamma, the gradient of the norm, a
        gradient of x from elsewhere) -> the whole gradient of x, and sums of gamma's and beta's over `step` tokens.
      m: Sizes.
      interpret: Whether Pallas' interpreter runs it.
    """
    del interpret
    rows = m.rows(NUMBERS)  # it divides `step`
    kernel, tokens = (_normalized, rows) if name == "normalized" else (_gradient, m.step)
    return Plan(functools.partial(kernel, m=m, count=rows), (m.tokens // tokens,), warps=max(1, m.width // 1024))


def _columns(m):
    return [pl.ds(first, m.columns) for first in range(0, m.width, m.columns)]


def _tiles(of, rows, m) -> Tiles:
    return [of[rows, cols] for cols in _columns(m)]


def _wide(tiles: Tiles) -> Tiles:
    return [tile.astype(jnp.float32) for tile in tiles]


def _mean(tiles: Tiles, m):
    """Of each token, `[rows, 1]`. Tiles are added first, so that one sum crosses threads."""
    return jnp.sum(functools.reduce(jnp.add, tiles), axis=1)[:, None] / m.width


def _standardized(tiles: Tiles, m):
    """Tokens of mean square 1, and what they were multiplied by, `[rows, 1]`."""
    if m.centered:
        mean = _mean(tiles, m)
        tiles = [tile - mean for tile in tiles]
    factor = lax.rsqrt(_mean([tile * tile for tile in tiles], m) + m.epsilon)
    return [tile * factor for tile in tiles], factor


def _normalized(x, gamma, beta, out, *, m, count):
    rows = pl.ds(pl.program_id(0) * count, count)
    tiles, _ = _standardized(_wide(_tiles(x, rows, m)), m)
    for tile, cols in zip(tiles, _columns(m), strict=True):
        out[rows, cols] = (tile * gamma[cols][None] + beta[cols][None]).astype(out.dtype)


def _gradient(x, gamma, dy, residual, dx, out, *, m, count):
    """With x' standardized and g = gamma dy: dx = residual + factor (g - x' mean(g x') - mean(g))."""
    group, columns, turns = pl.program_id(0), _columns(m), m.step // count
    gammas = [gamma[cols][None] for cols in columns]
    rows = lambda i: pl.ds(group * m.step + i * count, count)  # noqa: E731
    load = lambda i: [_tiles(of, rows(i), m) for of in (x, dy, residual)]  # noqa: E731

    def add(i, carry):
        sums, loaded = carry
        ahead = load(jnp.minimum(i + 1, turns - 1))  # so that the sums below do not wait for memory
        tiles, dys, rest = map(_wide, loaded)
        tiles, factor = _standardized(tiles, m)
        scaled = [tile * scale for tile, scale in zip(dys, gammas, strict=True)]
        along = _mean([g * tile for g, tile in zip(scaled, tiles, strict=True)], m)
        mean = _mean(scaled, m) if m.centered else 0.0
        for g, tile, other, cols in zip(scaled, tiles, rest, columns, strict=True):
            dx[rows(i), cols] = (other + factor * (g - tile * along - mean)).astype(dx.dtype)
        parts = [d * tile for d, tile in zip(dys, tiles, strict=True)], dys
        sums = [[a + jnp.sum(b, axis=0) for a, b in zip(*both, strict=True)] for both in zip(sums, parts, strict=True)]
        return sums, ahead

    zeros = [jnp.zeros((m.columns,), jnp.float32) for _ in columns]
    both, _ = lax.fori_loop(0, turns, add, ([zeros, zeros], load(0)))
    for i, totals in enumerate(both):
        for total, cols in zip(totals, columns, strict=True):
            out[group, i, cols] = total
