"""Mamba's selective scan, fused: the states of a token are in registers, where einsums write and read them."""

import keras
from keras import ops

from kernels_pallas import programs
from kernels_pallas.sizes import Scan
from kernels_xla.common.spec import Tensor
from kernels_xla.mamba.selective_scan import around

KERNELS = ["scan", "scan_states", "scan_gradient"]


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

    The backward pass keeps the inputs alone. It runs the scan again, writes every 8th state, and makes the others from
    those.

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
      The tokens of a row run one after another: the time grows with n, whatever b, until b e / 32 programs fill the
      GPU. Forward, memory and traffic are O(n e). Backward, every 8th state, n s e / 8 numbers, and the gradients of b
      and c by groups of 32 channels, n s e / 16 numbers, exist at a time.

    Precision:
      Steps, decays, states, sums and gradients are float32.
    """
    m = sizes(tuple(x.shape), a.shape[1], x.dtype)
    scan = lambda *inputs: ops.custom_gradient(lambda *flat: _with_gradient(m, *flat))(*_flat(m, *inputs))  # noqa: E731
    run = lambda *inputs: ops.reshape(scan(*inputs), (m.rows, m.n, m.e))[:, : x.shape[1]]  # noqa: E731
    return around(run, x, dt, a, b, c, d, padding_mask, segment_ids)


def sizes(shape: tuple, states: int, dtype) -> Scan:
    """The sizes of the kernels for x of that `shape` `[b, n, e]`, and so many `states` of a channel."""
    b, n, e = shape
    n = -(-n // Scan.STEP) * Scan.STEP
    return Scan(rows=b, n=n, e=e, s=states, dtype=keras.backend.standardize_dtype(dtype))


def obstacle(m: Scan) -> str | None:
    """Why the fused kernels cannot run, or None."""
    if m.dtype not in ("bfloat16", "float32") or m.channels < 16 or m.s & (m.s - 1):
        got = f"{m.dtype}, {m.e} channels of {m.s} states"
        return f"bfloat16 or float32, channels that are a multiple of 16 and states that are a power of 2, got {got}"
    return programs.obstacle(KERNELS, m)


def is_faster(m: Scan) -> bool:
    """Whether the fused kernels are faster than einsums, by what was measured at a few sizes.

    These were 1,536 channels of 16 states in bfloat16: 128 x 512, 8 x 8,192 and 1 x 65,536 tokens.
    """
    return m.dtype == "bfloat16" and m.channels == 32 and 8 <= m.s <= 16


def _flat(m, x, dt, a, b, c, on):
    """The kernels' arguments: the tokens of all rows in one axis, with zeros behind each row up to n."""
    more = m.n - x.shape[1]
    flat = lambda x: ops.reshape(ops.pad(x, [[0, 0], [0, more], [0, 0]]), (m.tokens, -1))  # noqa: E731
    on = ops.broadcast_to(on[..., 0], (m.rows, x.shape[1], 1))
    wide = lambda x: ops.cast(x, "float32")  # noqa: E731
    return flat(x), flat(wide(dt)), wide(a), flat(b), flat(c), ops.reshape(flat(wide(on)), (m.tokens,))


def _with_gradient(m, x, dt, a, b, c, on):
    """The scan, `[tokens, e]`, and its gradients."""

    def gradient(dout):
        [states] = programs.run("scan_states", m, x, dt, a, b, on)
        dx, ddt, da, db, dc = programs.run("scan_gradient", m, x, dt, a, b, c, on, dout, states)
        narrow = [ops.cast(ops.sum(x, axis=0), b.dtype) for x in (db, dc)]
        return ops.cast(dx, x.dtype), ddt, ops.sum(da, axis=0), *narrow, ops.zeros_like(on)

    return programs.run("scan", m, x, dt, a, b, c, on)[0], gradient
