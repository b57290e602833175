"""The loss of a head's logits in Pallas, through Triton: two kernels read them, where XLA takes five passes.

A tile is `ROWS` tokens of some columns. Logits are rounded after the bias, as einsums round them.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.launching import Plan
from kernels_pallas.sizes import Logits

ROWS = 4
MOST = 5  # tiles whose rows are reduced together
LEAST = float(jnp.finfo(jnp.float32).min)  # a maximum of -inf would make NaN of logits that all are -inf


def plan(name: str, m: Logits, interpret: bool) -> Plan:
    """How a kernel runs.

    Args:
      name: "normalizers": (logits without bias, bias, labels) -> log sum exp of each token's logits, its label's logit.
        "surplus": (the same, weights, normalizers) -> the loss's gradient in the place of the logits, sums of it over
        each `STEP` tokens.
      m: Sizes.
      interpret: Whether Pallas' interpreter runs it.
    """
    del interpret
    if name == "normalizers":
        return Plan(functools.partial(_normalizers, m=m), (m.tokens // ROWS,), warps=4)
    grid = m.vocabulary // m.columns, m.tokens // m.STEP
    return Plan(functools.partial(_surplus, m=m), grid, warps=2, in_place={0: 0})


def _tile(logits, bias, labels, rows, first, m):
    """The logits of a tile, float32, and where the labels are."""
    cols = pl.ds(first, m.columns)
    tile = logits[rows, cols].astype(jnp.float32) + bias[cols].astype(jnp.float32)[None]
    places = labels[rows].astype(jnp.int32)[:, None] - jnp.asarray(first, jnp.int32)
    return tile.astype(logits.dtype).astype(jnp.float32), places == lax.iota(jnp.int32, m.columns)[None]


def _normalizers(logits, bias, labels, normalizers, right, *, m):
    rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
    tiles = m.vocabulary // m.columns
    count = max(n for n in range(1, MOST + 1) if tiles % n == 0)

    def add(i, sums):
        largest, total, found = sums
        group = [_tile(logits, bias, labels, rows, (i * count + j) * m.columns, m) for j in range(count)]
        larger = jnp.maximum(largest, jnp.max(functools.reduce(jnp.maximum, [tile for tile, _ in group]), axis=1))
        total = total * jnp.exp(largest - larger)
        total += jnp.sum(sum(jnp.exp(tile - larger[:, None]) for tile, _ in group), axis=1)
        found += jnp.sum(sum(jnp.where(is_label, tile, 0.0) for tile, is_label in group), axis=1)
        return larger, total, found

    zeros = jnp.zeros((ROWS,), jnp.float32)
    largest, total, found = lax.fori_loop(0, tiles // count, add, (zeros + LEAST, zeros, zeros))
    normalizers[rows] = largest + jnp.log(total)
    right[rows] = found


def _surplus(logits, bias, labels, weights, normalizers, out, sums, *, m):
    first, group = pl.program_id(0) * m.columns, pl.program_id(1)
    cols = pl.ds(first, m.columns)

    def add(i, total):
        rows = pl.ds(group * m.STEP + i * ROWS, ROWS)
        tile, is_label = _tile(logits, bias, labels, rows, first, m)
        probability = jnp.exp(tile - normalizers[rows][:, None])
        surplus = weights[rows][:, None] * (probability - is_label.astype(jnp.float32))
        out[rows, cols] = surplus.astype(out.dtype)
        return total + surplus

    total = lax.fori_loop(0, m.STEP // ROWS, add, jnp.zeros((ROWS, m.columns), jnp.float32))
    sums[group, cols] = jnp.sum(total, axis=0)
