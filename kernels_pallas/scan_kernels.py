"""Mamba's selective scan in Pallas, through Triton: the states of a few channels stay in registers.

A program takes some channels of a row, and its tokens in their order, `STEP` at a time, whose loads come before their
use. The backward pass first runs forward and writes every `STEP`-th state `[s, channels]`. Then it goes from the last
token to the first, and makes the states between again.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.launching import Plan
from kernels_pallas.sizes import Scan


def plan(name: str, m: Scan, interpret: bool) -> Plan:
    """How a kernel runs.

    Args:
      name: "scan": (x, dt, a, b, c, on) -> c . h of each token. "scan_states": (x, dt, a, b, on) -> the states before
        every `STEP`-th token. "scan_gradient": (x, dt, a, b, c, on, the result's gradient, those states) -> the
        gradients of x, dt, a of each row, b and c of each program's channels.
      m: Sizes.
      interpret: Whether Pallas' interpreter runs it.
    """
    del interpret
    return Plan(functools.partial(KERNELS[name], m=m), (m.e // m.channels, m.rows), warps=1)


def _place(m):
    """The channels of a program, the number of steps before its row, and the steps of the row."""
    steps = m.n // m.STEP
    return pl.ds(pl.program_id(0) * m.channels, m.channels), pl.program_id(1) * steps, steps


def _loaded(m, cols, at, wide, narrow, on):
    """For each of `STEP` tokens from `at`: `cols` of each of `wide`, all of `narrow`, and its flag."""
    tokens = [at + j for j in range(m.STEP)]
    return [(*(_float(x[t, cols]) for x in wide), *(_float(x[t, :]) for x in narrow), on[t]) for t in tokens]


def _float(x):
    return x.astype(jnp.float32)


def _next(h, rate, x, dt, b, on):
    """The states after a token, `[s, channels]`."""
    return jnp.exp(dt[None] * rate) * on * h + b[:, None] * (dt * x)[None]


def _scan(x, dt, a, b, c, on, out, *, m):
    cols, before, steps = _place(m)
    rate = a[:, cols]

    def step(i, h):
        at = (before + i) * m.STEP
        for j, (xj, dtj, bj, cj, onj) in enumerate(_loaded(m, cols, at, (x, dt), (b, c), on)):
            h = _next(h, rate, xj, dtj, bj, onj)
            out[at + j, cols] = jnp.sum(cj[:, None] * h, axis=0)
        return h

    lax.fori_loop(0, steps, step, jnp.zeros(rate.shape, jnp.float32))


def _scan_states(x, dt, a, b, on, states, *, m):
    cols, before, steps = _place(m)
    rate = a[:, cols]

    def step(i, h):
        states[before + i, :, cols] = h
        for xj, dtj, bj, onj in _loaded(m, cols, (before + i) * m.STEP, (x, dt), (b,), on):
            h = _next(h, rate, xj, dtj, bj, onj)
        return h

    lax.fori_loop(0, steps, step, jnp.zeros(rate.shape, jnp.float32))


def _scan_gradient(x, dt, a, b, c, on, dout, states, dx, ddt, da, db, dc, *, m):
    cols, before, steps = _place(m)
    rate, program, row = a[:, cols], pl.program_id(0), pl.program_id(1)

    def step(i, carry):
        later, total = carry  # the gradient of the states through all later tokens, and the sum for `a`
        place = before + steps - 1 - i
        at = place * m.STEP
        given = _loaded(m, cols, at, (x, dt, dout), (b, c), on)
        h = [states[place, :, cols]]
        for xj, dtj, _, bj, _, onj in given:
            h.append(_next(h[-1], rate, xj, dtj, bj, onj))
        for j in reversed(range(m.STEP)):
            xj, dtj, doutj, bj, cj, onj = given[j]
            dh = later + cj[:, None] * doutj[None]
            later = jnp.exp(dtj[None] * rate) * onj * dh
            dlog = later * h[j]
            du = jnp.sum(dh * bj[:, None], axis=0)  # the gradient of dt x
            dx[at + j, cols] = du * dtj
            ddt[at + j, cols] = du * xj + jnp.sum(dlog * rate, axis=0)
            db[program, at + j, :] = jnp.sum(dh * (dtj * xj)[None], axis=1)
            dc[program, at + j, :] = jnp.sum(h[j + 1] * doutj[None], axis=1)
            total = total + dlog * dtj[None]
        return later, total

    zeros = jnp.zeros(rate.shape, jnp.float32)
    _, total = lax.fori_loop(0, steps, step, (zeros, zeros))
    da[row, :, cols] = total


KERNELS = {"scan": _scan, "scan_states": _scan_states, "scan_gradient": _scan_gradient}
