"""The gate of a gated linear unit in Pallas, through Triton: one pass over both branches forward, and one backward.

A program takes the same columns of both branches. Each activation is x c(x), and its derivative is c + x c'.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.launching import Plan, sigmoid
from kernels_pallas.sizes import Glu, block

NUMBERS = 1024  # of a branch that a program holds at a time
# erfc(z) = (a1 t + ... + a5 t^5) exp(-z^2), t = 1 / (1 + p z), z >= 0, to 1.5e-7: Abramowitz and Stegun, 7.1.26
ERFC_P = 0.3275911
ERFC_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def plan(name: str, m: Glu, interpret: bool) -> Plan:
    """How a kernel runs.

    Args:
      name: "glu": (p, bias) -> activation(gate) * value. "glu_gradient": (p, bias, the gradient of that) -> the
        gradient of p in its place, and sums of the bias's over each `step` tokens. p has the gate's columns, then the
        value's, without the bias.
      m: Sizes.
      interpret: Whether Pallas' interpreter runs it.
    """
    rows = block(m.step, max(1, NUMBERS // m.columns))
    options = {"m": m, "rows": rows, "factor": FACTORS[m.activation](sigmoid(m.dtype, interpret))}
    if name == "glu":
        return Plan(functools.partial(_glu, **options), (m.hidden // m.columns, m.tokens // rows), warps=2)
    grid = m.hidden // m.columns, m.tokens // m.step
    return Plan(functools.partial(_gradient, **options), grid, warps=4, in_place={0: 0})


Factor = Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # x -> c and x c'


def _silu(sigmoid) -> Factor:
    def factor(x):
        c = sigmoid(x)
        return c, x * c * (1.0 - c)

    return factor


def _gelu(sigmoid) -> Factor:
    """The normal distribution is c. Its exponential is in the derivative too."""
    del sigmoid

    def factor(x):
        size = jnp.abs(x) * math.sqrt(0.5)
        t = 1.0 / (1.0 + ERFC_P * size)
        density = jnp.exp(-size * size)
        beyond = 0.5 * density * functools.reduce(lambda sum, a: (sum + a) * t, reversed(ERFC_A), 0.0)
        return jnp.where(x < 0.0, beyond, 1.0 - beyond), x * density * math.sqrt(0.5 / math.pi)

    return factor


def _gelu_tanh(sigmoid) -> Factor:
    """In place of 0.5 (1 + tanh(u / 2)), c is sigmoid(u)."""

    def factor(x):
        slope = 2.0 * math.sqrt(2.0 / math.pi)
        square = 0.044715 * x * x
        c = sigmoid(slope * x * (1.0 + square))
        return c, slope * x * (1.0 + 3.0 * square) * c * (1.0 - c)

    return factor


FACTORS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


def _columns(m):
    """A program's columns of each branch."""
    first = pl.program_id(0) * m.columns
    return [pl.ds(first, m.columns), pl.ds(m.hidden + first, m.columns)]


def _wide(x):
    return x.astype(jnp.float32)


def _glu(p, bias, out, *, m, rows, factor):
    cols, tokens = _columns(m), pl.ds(pl.program_id(1) * rows, rows)
    gate, value = (_wide(p[tokens, here]) + bias[here][None] for here in cols)
    out[tokens, cols[0]] = (gate * factor(gate)[0] * value).astype(out.dtype)


def _gradient(p, bias, dy, dp, sums, *, m, rows, factor):
    cols, group, turns = _columns(m), pl.program_id(1), m.step // rows
    shift = [bias[here][None] for here in cols]
    tokens = lambda i: pl.ds(group * m.step + i * rows, rows)  # noqa: E731

    def add(i, totals):
        here = tokens(i)
        loaded = [p[here, cols[0]], p[here, cols[1]], dy[here, cols[0]]]
        gate, value, given = map(_wide, loaded)
        gate, value = gate + shift[0], value + shift[1]
        c, xdc = factor(gate)
        both = given * value * (c + xdc), given * gate * c
        for there, one in zip(cols, both, strict=True):
            dp[here, there] = one.astype(dp.dtype)
        return [total + one for total, one in zip(totals, both, strict=True)]

    zeros = [jnp.zeros((rows, m.columns), jnp.float32)] * 2
    totals = lax.fori_loop(0, turns, add, zeros)
    for there, total in zip(cols, totals, strict=True):
        sums[group, there] = jnp.sum(total, axis=0)
