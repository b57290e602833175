"""Mamba's selective scan in Pallas, through Triton: the states of a few channels stay in registers.

A program takes some channels of a part of a row, and its tokens in their order, `STEP` at a time, whose loads come
before their use. The backward pass first runs forward and writes every `STEP`-th state. Then it goes from the last
token to the first, and makes the states between again. States are `[s, channels]`.
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
      name: "scan_ends": (x, dt, a, b, on) -> the states after each part, from 0. "scan": (x, dt, a, b, c, on, states
        before each part) -> c . h of a token. "scan_starts": (dt, a, c, on, the result's gradient) -> the gradient
        of the states before each part, through that part alone. "scan_states": (x, dt, a, b, on, the states before
        each part) -> the states before every `STEP`-th token. "scan_gradient": (x, dt, a, b, c, on, the result's
        gradient, those states, the gradient of the states after each part) -> the gradients of x, dt, a by part, b and
        c by program.
      m: Sizes.
      interpret: Whether Pallas' interpreter runs it.
    """
    del interpret
    return Plan(functools.partial(KERNELS[name], m=m), (m.e // m.channels, m.runs), warps=1)


def _place(m):
    """The channels of a program, its part, and the number of steps before that and in it."""
    steps, part = m.n // m.STEP, pl.program_id(1)
    return pl.ds(pl.program_id(0) * m.channels, m.channels), part, part * steps, steps


def _loaded(m, cols, at, wide, narrow, on):
    """For each of `STEP` tokens from `at`: `cols` of each of `wide`, all of `narrow`, and its flag."""
    tokens = [at + j for j in range(m.STEP)]
    return [(*(_float(x[t, cols]) for x in wide), *(_float(x[t, :]) for x in narrow), on[t]) for t in tokens]


def _float(x):
    return x.astype(jnp.float32)


def _next(h, rate, x, dt, b, on):
    """The states after a token."""
    return jnp.exp(dt[None] * rate) * on * h + b[:, None] * (dt * x)[None]


def _run(m, x, dt, a, b, on, start, write=lambda i, h: None):
    """The states after a part; `write` gets the states before every `STEP`-th token."""
    cols, _, before, steps = _place(m)
    rate = a[:, cols]

    def step(i, h):
        write(before + i, h)
        for xj, dtj, bj, onj in _loaded(m, cols, (before + i) * m.STEP, (x, dt), (b,), on):
            h = _next(h, rate, xj, dtj, bj, onj)
        return h

    return lax.fori_loop(0, steps, step, start)


def _scan_ends(x, dt, a, b, on, ends, *, m):
    cols, part, *_ = _place(m)
    ends[part, :, cols] = _run(m, x, dt, a, b, on, jnp.zeros((m.s, m.channels), jnp.float32))


def _scan_states(x, dt, a, b, on, starts, states, *, m):
    cols, part, *_ = _place(m)

    def write(i, h):
        states[i, :, cols] = h

    _run(m, x, dt, a, b, on, starts[part, :, cols], write)


def _scan(x, dt, a, b, c, on, starts, out, *, m):
    cols, part, before, steps = _place(m)
    rate = a[:, cols]

    def step(i, h):
        at = (before + i) * m.STEP
        for j, (xj, dtj, bj, cj, onj) in enumerate(_loaded(m, cols, at, (x, dt), (b, c), on)):
            h = _next(h, rate, xj, dtj, bj, onj)
            out[at + j, cols] = jnp.sum(cj[:, None] * h, axis=0)
        return h

    lax.fori_loop(0, steps, step, starts[part, :, cols])


def _scan_starts(dt, a, c, on, dout, starts, *, m):
    cols, part, before, steps = _place(m)
    rate = a[:, cols]

    def step(i, later):
        at = (before + steps - 1 - i) * m.STEP
        for dtj, doutj, cj, onj in reversed(_loaded(m, cols, at, (dt, dout), (c,), on)):
            later = jnp.exp(dtj[None] * rate) * onj * (later + cj[:, None] * doutj[None])
        return later

    starts[part, :, cols] = lax.fori_loop(0, steps, step, jnp.zeros(rate.shape, jnp.float32))


def _scan_gradient(x, dt, a, b, c, on, dout, states, ends, dx, ddt, da, db, dc, *, m):
    cols, part, before, steps = _place(m)
    rate, program = a[:, cols], pl.program_id(0)

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

    _, total = lax.fori_loop(0, steps, step, (ends[part, :, cols], jnp.zeros(rate.shape, jnp.float32)))
    da[part, :, cols] = total


KERNELS = {
    "scan_ends": _scan_ends,
    "scan": _scan,
    "scan_starts": _scan_starts,
    "scan_states": _scan_states,
    "scan_gradient": _scan_gradient,
}
