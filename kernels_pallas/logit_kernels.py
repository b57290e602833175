"""The loss of a head's logits in Pallas, through Triton: two kernels read them, where XLA takes five passes.

A tile is `ROWS` tokens of some columns. Logits are rounded after the bias, as einsums round them.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.launching import Plan
from kernels_pallas.sizes import Logits

ROWS = 16
WARPS = 4


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
        return Plan(functools.partial(_normalizers, m=m), (m.tokens // ROWS,), WARPS)
    grid = m.vocabulary // m.columns, m.tokens // m.STEP
    return Plan(functools.partial(_surplus, m=m), grid, WARPS, in_place={0: 0})


def _tile(logits, bias, labels, rows, first, m):
    """The logits of a tile, float32, and where the labels are."""
    cols = pl.ds(first, m.columns)
    tile = logits[rows, cols].astype(jnp.float32) + bias[cols].astype(jnp.float32)[None]
    places = labels[rows].astype(jnp.int32)[:, None] - jnp.asarray(first, jnp.int32)
    return tile.astype(logits.dtype).astype(jnp.float32), places == lax.iota(jnp.int32, m.columns)[None]


def _normalizers(logits, bias, labels, normalizers, right, *, m):
    rows = pl.ds(pl.program_id(0) * ROWS, ROWS)

    def add(i, sums):
        largest, total, found = sums
        tile, is_label = _tile(logits, bias, labels, rows, i * m.columns, m)
        larger = jnp.maximum(largest, jnp.max(tile, axis=1))
        total = total * jnp.exp(largest - larger) + jnp.sum(jnp.exp(tile - larger[:, None]), axis=1)
        return larger, total, found + jnp.sum(jnp.where(is_label, tile, 0.0), axis=1)

    zeros = jnp.zeros((ROWS,), jnp.float32)
    largest, total, found = lax.fori_loop(0, m.vocabulary // m.columns, add, (zeros - jnp.inf, zeros, zeros))
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
        return total + jnp.sum(surplus, axis=0)

    sums[group, cols] = lax.fori_loop(0, m.STEP // ROWS, add, jnp.zeros((m.columns,), jnp.float32))
