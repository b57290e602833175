"""Linear attention with decay, fused: the weights of pairs are made on the chip, where einsums write their parts."""

import keras
from keras import ops

from kernels_pallas import programs
from kernels_pallas.sizes import Decayed
from kernels_xla.common.masks import documents, zero_outside
from kernels_xla.common.recurrence import check_causal, entering, of_heads
from kernels_xla.common.spec import Tensor

FORWARD = ["decays", "pairs", "added", "entering", "decayed_sums"]
BACKWARD = ["added_later", "entering_later", "value_sums", "pairs_gradient", "key_sums"]
TOKENS = 8192  # of the smallest step that was timed
KEYS, VALUES = range(64, 193), range(64, 385)  # widths of the heads that were timed, and between them
APART = -41.0  # log decay at a document's first token: less than the kernels' least, so that its exponential is 0


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    causal: bool = True,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """`kernels_xla.gla.gated_linear_attention` without decays of values, of static shapes, in bfloat16 or float32.

    The backward pass keeps the inputs, the decays summed in chunks of 64 tokens, the weights of the chunks' pairs, and
    the states that enter chunks.

    Args:
      q: `[b, n, h, s]`.
      k: `[b, n, h, s]`.
      v: `[b, n, h, e]`.
      log_decay: `[b, n, h, s]`, float32.
      causal: Must be True.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Raises:
      ValueError: `causal` is False.

    Cost:
      As einsums have, with chunks of 64 tokens and six exponentials a channel. Traffic and memory are O(n h (s + e) + n
      h s e / 64). The states of a row pass from chunk to chunk one after another.

    Precision:
      As einsums have, but a decay below e^-40 is 0, and what each chunk adds to the state is rounded to the dtype of
      `v`.
    """
    check_causal("gla", causal)
    return _decayed(q, k, v, log_decay, padding_mask, segment_ids)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    causal: bool = True,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """`kernels_xla.retention.retention`, of static shapes; else as `gated_linear_attention`.

    Args:
      q: `[b, n, h, s]`.
      k: `[b, n, h, s]`.
      v: `[b, n, h, e]`.
      log_decay: `[b, n, h]`, float32.
      causal: Must be True.
      padding_mask: `[b, n]`, True at real tokens.
      segment_ids: `[b, n]`, 0 at padding.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Raises:
      ValueError: `causal` is False.
    """
    check_causal("retention", causal)
    return _decayed(q, k, v, log_decay[..., None], padding_mask, segment_ids)


def sizes(shape: tuple, key_width: int, shared: bool, dtype) -> Decayed:
    """The sizes of the kernels for values of that `shape` `[b, n, h, e]`.

    Args:
      shape: Of the values.
      key_width: s.
      shared: Whether all channels of a head share one decay.
      dtype: Of the values.
    """
    b, n, heads, e = shape
    dtype = keras.backend.standardize_dtype(dtype)
    chunks = -(-n // Decayed.CHUNK)
    return Decayed(rows=b, chunks=chunks, heads=heads, s=key_width, e=e, shared=shared, dtype=dtype)


def obstacle(m: Decayed) -> str | None:
    """Why the fused kernels cannot run, or None."""
    if m.dtype not in ("bfloat16", "float32") or m.keys < 16 or m.values < 16:
        got = f"{m.dtype}, keys of {m.s} and values of {m.e}"
        return f"bfloat16 or float32, and keys and values of a head that are multiples of 16 wide, got {got}"
    return programs.obstacle(FORWARD + BACKWARD, m)


def is_faster(m: Decayed) -> bool:
    """Whether the fused kernels are faster than einsums, by what was measured at a few sizes in TensorFlow.

    With 12 heads of 64 and 64 steps of 8,192, 16,384 and 65,536 tokens were, with 4 heads of 96 and 192 steps of 8,192
    and 65,536, and with 4 heads of 192 and 384 steps of 65,536.
    """
    if keras.config.backend() != "tensorflow" or m.dtype != "bfloat16" or m.tokens < TOKENS:
        return False
    return m.keys >= 32 and m.values >= 64 and m.s in KEYS and m.e in VALUES


def _decayed(q, k, v, log_decay, padding_mask, segment_ids):
    """Log decays are `[b, n, h, s]`, or `[b, n, h, 1]` if all channels share them."""
    m = sizes(tuple(v.shape), q.shape[-1], log_decay.shape[-1] == 1, v.dtype)
    ids = documents(padding_mask, segment_ids)
    real = of_heads(None if ids is None else ids > 0)
    k, v, log_decay = (zero_outside(x, real) for x in (k, v, ops.cast(log_decay, "float32")))
    if segment_ids is not None:  # a decay to 0 keeps documents apart
        begins = of_heads(ops.logical_and(ids > 0, ids != entering(ids)))
        log_decay = ops.where(begins, APART, log_decay)
    flat = [_flat(m, x) for x in (ops.cast(q, v.dtype), ops.cast(k, v.dtype), v, log_decay)]
    out = ops.custom_gradient(lambda *given: _with_gradient(m, *given))(*flat)
    return zero_outside(ops.reshape(out, (m.rows, -1, m.heads, m.e))[:, : v.shape[1]], real)


def _flat(m, x):
    """`[b, n, h, s]` -> `[tokens, h s]`, with zeros behind each row."""
    x = ops.reshape(x, (*x.shape[:2], -1))
    return ops.reshape(ops.pad(x, [[0, 0], [0, m.chunks * m.CHUNK - x.shape[1]], [0, 0]]), (m.tokens, -1))


def _with_gradient(m, q, k, v, log_decay):
    """The sums, `[tokens, h e]`, and their gradients."""
    run = lambda name, *given: programs.run(name, m, *given)  # noqa: E731
    [b] = run("decays", log_decay)
    [weights] = run("pairs", q, k, b)
    [states] = run("entering", *run("added", k, v, b), b)

    def gradient(dout):
        [later] = run("entering_later", *run("added_later", q, dout, b), b)
        [dv] = run("value_sums", k, dout, b, weights, later)
        [pairs] = run("pairs_gradient", v, dout, b)
        dq, dk, dlog = run("key_sums", q, k, v, b, dout, states, later, pairs)
        return dq, dk, dv, ops.sum(dlog, axis=0) if m.shared else dlog

    return run("decayed_sums", q, v, b, weights, states)[0], gradient
