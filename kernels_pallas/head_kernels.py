"""FLASH's heads in Pallas, through Triton: one pass over the representation z forward, and one backward.

z = silu of the last columns of the in-projection. Head h is gamma_h z + beta_h. If it turns, each of its channels in
the first half, with the one that is half a width further, is rotated by the token's angle.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.launching import Plan, sigmoid
from kernels_pallas.sizes import Heads, block

ROWS = 32  # tokens of a program of `heads`
NUMBERS = 256  # of half a head that a program of `heads_gradient` holds at a time, 4 for each thread


def plan(name: str, m: Heads, interpret: bool) -> Plan:
    """How a kernel runs. A program takes some tokens, and the same columns of both halves of all heads.

    Args:
      name: "heads": (p, bias, gammas, betas, cos, sin) -> the heads, `[tokens, s]` each. "heads_gradient": (p, bias,
        gammas, cos, sin, the heads' gradients, dp) -> dp with the columns of z, and sums of the gradients of gammas,
        betas and bias over each `step` tokens. p is the in-projection without its bias.
      m: Sizes.
      interpret: Whether Pallas' interpreter runs it.
    """
    options = {"m": m, "sigmoid": sigmoid(m.dtype, interpret)}
    grid = lambda tokens: (m.half // m.columns, m.tokens // tokens)  # noqa: E731
    if name == "heads":
        rows = block(m.positions, ROWS)
        return Plan(functools.partial(_heads, rows=rows, **options), grid(rows), warps=4)
    kernel = functools.partial(_gradient, rows=block(m.step, max(1, NUMBERS // m.columns)), **options)
    return Plan(kernel, grid(m.step), warps=2, in_place={5 + len(m.turned): 0})


def _columns(m):
    """A program's columns: in half a head, in both halves of a head, and in p."""
    first = pl.program_id(0) * m.columns
    at = lambda start: pl.ds(start + first, m.columns)  # noqa: E731
    return at(0), [at(0), at(m.half)], [at(m.first), at(m.first + m.half)]


def _wide(x):
    return x.astype(jnp.float32)


def _angles(cos, sin, first, rows, cols, m):
    at = pl.ds(lax.rem(jnp.asarray(first, jnp.int32), jnp.int32(m.positions)), rows)
    return cos[at, cols], sin[at, cols]


def _heads(p, bias, gammas, betas, cos, sin, *heads, m, sigmoid, rows):
    cols, own, of_p = _columns(m)
    first = pl.program_id(1) * rows
    tokens = pl.ds(first, rows)
    z = [_wide(p[tokens, there]) + bias[here][None] for there, here in zip(of_p, own, strict=True)]
    z = [x * sigmoid(x) for x in z]
    c, s = _angles(cos, sin, first, rows, cols, m)
    for h, (out, turns) in enumerate(zip(heads, m.turned, strict=True)):
        a, b = (x * gammas[h, here][None] + betas[h, here][None] for x, here in zip(z, own, strict=True))
        a, b = (a * c - b * s, b * c + a * s) if turns else (a, b)
        out[tokens, own[0]], out[tokens, own[1]] = a.astype(out.dtype), b.astype(out.dtype)


def _gradient(p, bias, gammas, cos, sin, *rest, m, sigmoid, rows):
    of_heads, (dp_in, dp, sums) = rest[: len(m.turned)], rest[len(m.turned) :]
    del dp_in  # the same memory as dp
    (cols, own, of_p), group = _columns(m), pl.program_id(1)
    heads = len(m.turned)
    scales = [[gammas[h, here][None] for here in own] for h in range(heads)]
    shift = [bias[here][None] for here in own]

    def add(i, added):
        first = group * m.step + i * rows
        tokens = pl.ds(first, rows)
        given = [[_wide(of[tokens, here]) for here in own] for of in of_heads]  # at once: each would wait for the last
        x = [_wide(p[tokens, there]) + one for there, one in zip(of_p, shift, strict=True)]
        c, s = _angles(cos, sin, first, rows, cols, m)
        gate = [sigmoid(one) for one in x]
        z, dz, dgammas, dbetas = [one * g for one, g in zip(x, gate, strict=True)], [0.0, 0.0], [], []
        for (a, b), turns, scale in zip(given, m.turned, scales, strict=True):
            back = (a * c + b * s, b * c - a * s) if turns else (a, b)
            dz = [total + one * by for total, one, by in zip(dz, back, scale, strict=True)]
            dgammas += [one * by for one, by in zip(back, z, strict=True)]
            dbetas += back
        dx = [d * (g + y * (1.0 - g)) for d, g, y in zip(dz, gate, z, strict=True)]  # silu'
        for there, one in zip(of_p, dx, strict=True):
            dp[tokens, there] = one.astype(dp.dtype)
        return [total + one for total, one in zip(added, [*dgammas, *dbetas, *dx], strict=True)]

    zeros = [jnp.zeros((rows, m.columns), jnp.float32)] * (4 * heads + 2)
    totals = [jnp.sum(one, axis=0) for one in lax.fori_loop(0, m.step // rows, add, zeros)]
    for i, total in enumerate(totals):
        sums[group, i // 2, own[i % 2]] = total
