"""Mamba's selective scan, fused: the states of a token are in registers, where einsums write and read them."""

import dataclasses

import keras
from keras import ops

from kernels_pallas import programs
from kernels_pallas.sizes import Scan
from kernels_xla.common.recurrence import after, over_tokens, shifted
from kernels_xla.common.spec import Tensor
from kernels_xla.mamba.selective_scan import around

KERNELS = ["scan_ends", "scan", "scan_starts", "scan_states", "scan_gradient"]
FEWEST = 192  # programs of what was timed; rows are parted for so many, each part of SHORTEST tokens or more
SHORTEST = 128
PROGRAMS = 1536  # and on for so many, each part of LONG tokens: 15.0 ms on an H200 where 384 programs take 17.2
LONG = 2048
WIDE, MANY = 1536, 32_768  # the fewest channels and tokens of what was timed beside einsums
LOCAL = 16  # parts that pass their states one after another


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    *,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """`kernels_xla.mamba.selective_scan.selective_scan`, of static shapes, in bfloat16 or float32.

    The backward pass keeps the inputs and the first state of each part. It runs the scan again, writes every 8th state,
    and makes the others from those.

    Args:
      x: `[b, n, e]`.
      dt: `[b, n, e]`, float32.
      a: `[e, s]`, float32.
      b: `[b, n, s]`.
      c: `[b, n, s]`.
      d: `[e]`.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding.

    Returns:
      `[b, n, e]`, in the dtype of `x`; 0 at padding.

    Cost:
      Tokens run one after another, in parts of a row that run together. With more than one part, states pass between
      the parts, and a token's states are made twice in each pass. Forward, memory and traffic are O(n e). Backward,
      every 8th state, n s e / 8 numbers, and the gradients of b and c by groups of 32 channels, n s e / 16 numbers,
      exist at a time.

    Precision:
      Steps, decays, states, sums and gradients are float32.
    """
    m = sizes(tuple(x.shape), a.shape[1], x.dtype)
    scan = ops.custom_gradient(lambda *flat: _with_gradient(m, *flat))
    run = lambda *inputs: ops.reshape(scan(*_flat(m, *inputs)), (m.rows, -1, m.e))[:, : x.shape[1]]  # noqa: E731
    return around(run, x, dt, a, b, c, d, padding_mask, segment_ids)


def sizes(shape: tuple, states: int, dtype) -> Scan:
    """The sizes of the kernels for x of that `shape` `[b, n, e]`, and so many `states` of a channel."""
    b, n, e = shape
    m = Scan(rows=b, parts=1, n=n, e=e, s=states, dtype=keras.backend.standardize_dtype(dtype))
    for least, shortest in ((FEWEST, SHORTEST), (PROGRAMS, LONG)):
        while m.programs < least and n >= 2 * m.parts * shortest:
            m = dataclasses.replace(m, parts=2 * m.parts)
    return dataclasses.replace(m, n=-(-n // (m.parts * m.STEP)) * m.STEP)


def obstacle(m: Scan) -> str | None:
    """Why the fused kernels cannot run, or None."""
    if m.dtype not in ("bfloat16", "float32") or m.channels < 16 or m.s & (m.s - 1):
        got = f"{m.dtype}, {m.e} channels of {m.s} states"
        return f"bfloat16 or float32, channels that are a multiple of 16 and states that are a power of 2, got {got}"
    return programs.obstacle(KERNELS, m)


def is_faster(m: Scan) -> bool:
    """Whether the fused kernels are faster than einsums, by what was measured in TensorFlow.

    These were 1,536 channels of 16 states, for 128 x 512, 8 x 8,192, 4 x 8,192 and 1 x 65,536 tokens. More channels are
    more programs of the same kind.
    """
    return (
        keras.config.backend() == "tensorflow" and m.s == 16 and m.channels == 32 and m.e >= WIDE and m.tokens >= MANY
    )


def _flat(m, x, dt, a, b, c, on):
    """The kernels' arguments: the tokens of all parts in one axis, with zeros behind each row."""
    length = m.tokens // m.rows
    flat = lambda x: ops.reshape(ops.pad(x, [[0, 0], [0, length - x.shape[1]], [0, 0]]), (m.tokens, -1))  # noqa: E731
    on = ops.broadcast_to(on[..., 0], (m.rows, x.shape[1], 1))
    wide = lambda x: ops.cast(x, "float32")  # noqa: E731
    b, c = (ops.cast(part, x.dtype) for part in (b, c))
    return flat(x), flat(wide(dt)), wide(a), flat(b), flat(c), ops.reshape(flat(wide(on)), (m.tokens,))


def _with_gradient(m, x, dt, a, b, c, on):
    """The scan, `[tokens, e]`, and its gradients."""
    parts = lambda x: ops.reshape(x, (m.rows, m.parts, m.s, m.e))  # noqa: E731
    flat = lambda x: ops.reshape(x, (m.runs, m.s, m.e))  # noqa: E731

    def decay():  # of a whole part
        steps = ops.sum(ops.reshape(dt, (m.runs, 1, m.n, m.e)), axis=2)
        return parts(ops.exp(steps * a) * ops.min(ops.reshape(on, (m.runs, 1, 1, m.n)), axis=3))

    def starts():
        if m.parts == 1:
            return ops.zeros((m.runs, m.s, m.e), "float32")
        [ends] = programs.run("scan_ends", m, x, dt, a, b, on)
        return flat(shifted(over_tokens(decay(), parts(ends), LOCAL), 1))

    def later(dout):
        if m.parts == 1:
            return ops.zeros((m.runs, m.s, m.e), "float32")
        [before] = programs.run("scan_starts", m, dt, a, c, on, dout)
        found = over_tokens(ops.flip(decay(), 1), ops.flip(parts(before), 1), LOCAL)
        return flat(ops.flip(shifted(found, 1), 1))

    start = starts()

    def gradient(dout):
        again = after(dout, a)  # else a compiler may make the states in the forward pass, and keep them
        [states] = programs.run("scan_states", m, x, dt, again, b, on, start)
        dx, ddt, da, db, dc = programs.run("scan_gradient", m, x, dt, a, b, c, on, dout, states, later(dout))
        narrow = [ops.cast(ops.sum(x, axis=0), b.dtype) for x in (db, dc)]
        return ops.cast(dx, x.dtype), ddt, ops.sum(da, axis=0), *narrow, ops.zeros_like(on)

    return programs.run("scan", m, x, dt, a, b, c, on, start)[0], gradient
