"""Mamba's selective scan: a diagonal state space whose steps, inputs and outputs depend on the text.

Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv:2312.00752, sections 3.2
and 3.3. A is discretised exactly, and B to first order, as in the authors' code.
"""

import math

from keras import ops

from kernels_xla.common.accelerator import on_lite
from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.masks import documents, zero_outside
from kernels_xla.common.recurrence import arrived, check_causal, entering, over_tokens, shifted
from kernels_xla.common.spec import KernelSpec, Stream, Tensor


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    *,
    chunk_size: int = 16,
    channels: int = 32,
    causal: bool = True,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """h[i] = exp(dt[i] a) h[i - 1] + dt[i] b[i] x[i]; out[i] = c[i] . h[i] + d x[i], for each channel of x.

    Args:
      x: `[b, n, e]`.
      dt: The step of each token and channel, `[b, n, e]`, never negative, of any size. Give it in float32.
      a: `[e, s]`, never positive. Give it in float32.
      b: Weights with which a token enters the s states of every channel, `[b, n, s]`.
      c: Weights with which a token reads the states, `[b, n, s]`.
      d: Weights of the skip connection past the states, `[e]`.
      chunk_size: Number of tokens that run one after another. Chunks run together. It changes only the speed.
      channels: Number of channels that run together. It changes only speed and memory.
      causal: Must be True: a scan has an order.
      padding_mask: `[b, n]`, True at real tokens. Padding leaves the state as it is.
      segment_ids: `[b, n]`, 0 at padding. Each document starts from an empty state.

    Returns:
      `[b, n, e]`, in the dtype of `x`; 0 at padding.

    Raises:
      ValueError: `causal` is False.

    Cost:
      O(n e s) multiply-adds and exponentials. Only the states of a few channels exist at a time, and the gradient
      computes them again: about ten tensors of O(n channels s), and O(n e). With 32 channels and 16 states, one of
      these is as large as 512 channels of x. The gradients of b and c are kept for each group until the end:
      O(n s e / channels).

    Precision:
      Steps, decays, states and sums are float32. No exponent is above 0, and each covers a single token.
    """
    check_causal("selective_scan", causal)

    def scan(*inputs):
        inputs = (ops.cast(part, sum_dtype(x)) for part in inputs)
        return ops.custom_gradient(lambda *inputs: _with_gradient(*inputs, chunk_size, channels))(*inputs)

    return around(scan, x, dt, a, b, c, d, padding_mask, segment_ids)


def around(scan, x, dt, a, b, c, d, padding_mask, segment_ids):
    """All of `selective_scan` but the scan itself: masks and the skip connection.

    `scan` goes from x, dt, a `[s, e]`, b, c, and a tensor that is 0 where a document begins and 1 elsewhere,
    `[b, n, 1, 1]` or `[1, 1, 1, 1]`, to `[b, n, e]` in float32.
    """
    ids, wide = documents(padding_mask, segment_ids), sum_dtype(x)
    real = None if ids is None else (ids > 0)[..., None]
    x, dt, b, c = (zero_outside(part, real) for part in (x, dt, b, c))
    out = scan(x, dt, ops.transpose(a), b, c, _goes_on(ids, segment_ids, wide))
    return zero_outside(ops.cast(out + ops.cast(d, wide) * ops.cast(x, wide), x.dtype), real)


def _goes_on(ids, segment_ids, dtype):
    """0 where a document begins, 1 where a token has a state before it: `[b, n, 1, 1]`, or `[1, 1, 1, 1]`."""
    if segment_ids is None:
        return ops.ones((1, 1, 1, 1), dtype)
    return ops.cast(ops.logical_or(ids == 0, ids == entering(ids)), dtype)[..., None, None]


def _with_gradient(x, dt, a, b, c, on, chunk_size, channels):
    """`[b, n, e]`, and its gradients by hand, which keep only the inputs; a is `[s, e]`.

    Groups of channels run in a loop. There the compiler does not find the states of the forward pass, and so does not
    keep them.
    """

    def states(x, dt, a):
        decay = ops.exp(dt[:, :, None] * a) * on  # [b, n, s, m]
        return decay, over_tokens(decay, b[..., None] * (dt * x)[:, :, None], chunk_size)

    def gradients(x, dt, a, dout):
        decay, h = states(x, dt, a)
        # The same scan backwards gives the gradient of each state through all later outputs.
        later, added = shifted(ops.flip(decay, 1), 1), ops.flip(c[..., None] * dout[:, :, None], 1)
        dh = ops.flip(over_tokens(later, added, chunk_size), 1)
        dlog = dh * decay * shifted(h, 1)
        du = ops.sum(dh * b[..., None], axis=2)  # the gradient of dt x
        return (
            du * dt,
            du * x + ops.sum(dlog * a, axis=2),
            ops.sum(dlog * dt[:, :, None], axis=(0, 1)),
            ops.sum(dh * (dt * x)[:, :, None], axis=-1),
            ops.sum(h * dout[:, :, None], axis=-1),
        )

    def gradient(dout):
        dx, ddt, da, db, dc = _in_groups(gradients, channels, x, dt, a, dout)
        return *map(_joined, (dx, ddt, da)), ops.sum(db, axis=0), ops.sum(dc, axis=0), ops.zeros_like(on)

    read = lambda *group: (ops.sum(c[..., None] * states(*group)[1], axis=2),)  # noqa: E731
    return _joined(_in_groups(read, channels, x, dt, a)[0]), gradient


def _in_groups(function, channels, *inputs):
    """Runs `function` on m = gcd(e, `channels`) channels at a time: all `[..., e]` -> results `[e / m, ...]`."""
    e = inputs[0].shape[-1]
    m = math.gcd(e, channels)
    if m == e or on_lite():  # TensorFlow Lite cannot loop over parts of unknown length
        return [x[None] for x in function(*inputs)]
    cut = [ops.moveaxis(ops.reshape(x, (*ops.shape(x)[:-1], e // m, m)), -2, 0) for x in inputs]
    return ops.map(lambda group: function(*group), cut)


def _joined(x):
    """`[e / m, ..., m]` -> `[..., e]`."""
    x = ops.moveaxis(x, 0, -2)
    return ops.reshape(x, (*ops.shape(x)[:-2], x.shape[-2] * x.shape[-1]))


def selective_scan_reference(
    x, dt, a, b, c, d, *, chunk_size=None, channels=None, causal=True, padding_mask=None, segment_ids=None
):
    """The sum over dense weights of pairs, `[b, i, j, e]`, for one state after another."""
    del chunk_size, channels, causal  # they do not change the function
    ids = documents(padding_mask, segment_ids)
    ids = ops.ones(x.shape[:2], "int32") if ids is None else ids
    seen = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    seen = (seen & ops.tril(ops.ones((x.shape[1], x.shape[1]), "bool")))[..., None]  # [b, i, j, 1]
    real, wide = ops.cast(ids > 0, x.dtype)[..., None], sum_dtype(x)
    until = ops.cumsum(ops.cast(dt * real, wide), axis=1)
    between, out = ops.where(seen, until[:, :, None] - until[:, None], 0), d * x * real
    for state in range(a.shape[1]):
        decay = ops.cast(ops.exp(between * ops.cast(a[:, state], wide)) * ops.cast(seen, wide), x.dtype)
        added = dt * b[..., state, None] * x  # [b, j, e]
        out = out + c[..., state, None] * ops.einsum("bije,bje->bie", decay, added)
    return out


def initial_state(sizes, case, dtype):
    """State before the first token, constant in n: `ssm [b, s, e]`, float32, and `position [b]`, int32."""
    del case
    wide = "float64" if str(dtype) == "float64" else "float32"
    return {
        "ssm": ops.zeros([sizes[axis] for axis in "bse"], wide),
        "position": ops.zeros((sizes["b"],), "int32"),
    }


def extend(state, x, dt, a, b, c, d, *, valid=None, chunk_size=16, channels=32, causal=True):
    """The next k tokens of each row. One token costs O(e s); more tokens go by chunks."""
    check_causal("selective_scan", causal)
    before, k = state["ssm"], ops.shape(x)[1]
    real = arrived(k, valid)
    x, dt, b, c = (zero_outside(part, None if real is None else real[..., None]) for part in (x, dt, b, c))
    wide = [ops.cast(part, before.dtype) for part in (x, dt, ops.transpose(a), b, c)]
    out, after = (_one if x.shape[1] == 1 else _more)(before, *wide, chunk_size, channels)
    out = ops.cast(out + ops.cast(d, before.dtype) * wide[0], x.dtype)
    return out, {"ssm": after, "position": state["position"] + (k if valid is None else valid)}


def _one(before, x, dt, a, b, c, chunk_size, channels):
    """A single token: `[b, 1, e]`, and the state `[b, s, e]`."""
    after = ops.exp(dt * a) * before + b[:, 0, :, None] * (dt * x)
    return ops.sum(c[:, 0, :, None] * after, axis=1, keepdims=True), after


def _more(before, x, dt, a, b, c, chunk_size, channels):
    """Several tokens: `[b, k, e]`, and the state after the last, `[b, s, e]`."""

    def group(before, x, dt, a):
        decay, added = ops.exp(dt[:, :, None] * a), b[..., None] * (dt * x)[:, :, None]
        first = added[:, :1] + decay[:, :1] * before[:, None]  # the state before enters with the first token
        h = over_tokens(decay, ops.concatenate([first, added[:, 1:]], axis=1), chunk_size)
        return ops.sum(c[..., None] * h, axis=2), h[:, -1]

    out, after = _in_groups(group, channels, before, x, dt, a)
    return _joined(out), _joined(after)


def state_bytes(sizes, case, itemsize):
    del case, itemsize
    return sizes["b"] * (4 * sizes["s"] * sizes["e"] + 4)


def _flops(sizes, case):
    """A token enters the states, reads them, and has a skip connection. Decays are not counted."""
    del case
    return sizes["b"] * sizes["n"] * sizes["e"] * (4 * sizes["s"] + 2)


SPEC = KernelSpec(
    name="selective_scan",
    fast=selective_scan,
    reference=selective_scan_reference,
    stream=Stream(initial_state=initial_state, extend=extend, supports=lambda case: True),
    inputs={"x": "bne", "dt": "bne", "a": "es", "b": "bns", "c": "bns", "d": "e"},
    flops=_flops,
    state_bytes=state_bytes,
    ranges={"dt": (0.0, 0.5), "a": (-2.0, 0.0)},
)
