"""FLASH's core from the in-projection to the gated values, fused: `silu(u) * mixed_chunk_attention(..., silu(v))`."""

from collections.abc import Callable

import keras
from keras import ops

from kernels_pallas import programs
from kernels_pallas.sizes import Chunks, block
from kernels_xla.common.chunking import fold
from kernels_xla.common.masks import documents
from kernels_xla.common.spec import Tensor
from kernels_xla.flash.operands import Operands, operands

KERNELS = ["values", "gated", "gate_gradient", "gate_sums", "value_gradient", "representation_gradient"]
SUMS = ["sums", "sums_gradient"]
MEASURED = (256, 1536, 128)  # tokens of a chunk, and widths of values and keys: FLASH base
TOKENS = 65_536  # of a step on one device, in all measurements


def gated_mixed_chunk_attention(
    p: Tensor,
    bias: Tensor,
    heads: Callable[[Tensor], dict[str, Tensor]],
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    value_width: int,
    chunk_size: int,
    causal: bool = False,
    scale: str = "normalized",
    chunk_divisor: bool = False,
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
) -> Tensor:
    """Gated attention: u * A(heads(z), v) for u, v, z = silu(p + bias), where A is FLASH's attention with both sums.

    The backward pass keeps p, the activated values, the sums over chunks, the result, and what is as narrow as z. It
    does not keep u, the attended values or their gradients.

    Args:
      p: The in-projection without its bias, `[b, n, 2e + s]`, bfloat16 or float32, of a static shape.
      bias: Its bias, `[2e + s]`.
      heads: From z `[b, n, s]` to the four heads of `mixed_chunk_attention`, by name.
      a: See `mixed_chunk_attention`, as all below.
      b: See `mixed_chunk_attention`.
      value_width: e.
      chunk_size: c.
      causal: Whether position i may depend only on positions <= i.
      scale: The place of the divisor.
      chunk_divisor: Whether the second sum is divided by c.
      padding_mask: `[b, n]`, True at real tokens. At padding p must be finite.
      segment_ids: `[b, n]`, 0 at padding.
      offset: Added to the positions of the bias.

    Returns:
      `[b, n, e]`, in the dtype of `p`; 0 at padding.

    Cost:
      As `mixed_chunk_attention`. About 20 tensors as wide as the values are read or written forward and backward, where
      einsums take about 40.

    Precision:
      Sums over chunks are float32 and rounded once. In bfloat16, sigmoids are exact to 2^-11. The gradients of the
      biases of u and v are float32 sums of unrounded numbers.
    """
    n, e, ids = p.shape[1], value_width, documents(padding_mask, segment_ids)
    m = sizes(tuple(p.shape), p.dtype, e, chunk_size, causal, segment_ids is not None)
    rows = ops.reshape(fold(p, chunk_size), (m.tokens, m.width))
    rows, z = ops.custom_gradient(lambda rows: _with_representation(m, rows))(rows)
    z = ops.reshape(z, (m.rows, m.chunks * m.c, m.s))[:, :n]
    z = ops.silu(z + ops.cast(bias[2 * e :], z.dtype))
    options = {"chunk_size": chunk_size, "causal": causal, "scale": scale, "chunk_divisor": chunk_divisor}
    found = operands(**heads(z), a=a, b=b, **options, ids=ids, packed=segment_ids is not None, offset=offset)
    wide = ops.cast(bias[None, : 2 * e], "float32")
    flat = [ops.reshape(x, (m.tokens, -1)) for x in (found.weights, found.q, found.k)]
    out = ops.custom_gradient(lambda *given: _gated(m, *given))(rows, wide, *flat, *_flags(m, found))
    return ops.reshape(out, (m.rows, -1, e))[:, :n]


def sizes(shape: tuple, dtype, value_width: int, chunk_size: int, causal: bool, packed: bool) -> Chunks:
    """The sizes of the kernels for p of that `shape` `[b, n, 2e + s]`."""
    b, n, width = shape
    s = width - 2 * value_width
    orders = ("earlier",) if causal else ("earlier", "later") if packed else ("all",)
    return Chunks(
        rows=b,
        chunks=-(-n // chunk_size),
        c=chunk_size,
        t=s * len(orders),
        e=value_width,
        s=s,
        dtype=keras.backend.standardize_dtype(dtype),
        causal=causal,
        orders=orders,
        plain=not packed,
    )


def obstacle(m: Chunks) -> str | None:
    """Why the fused kernels cannot run, or None."""
    least = min(block(size, 16) for size in (m.c, m.e, m.s))
    if m.dtype not in ("bfloat16", "float32") or least < 16:
        got = f"{m.dtype}, chunks of {m.c}, widths {m.e} and {m.s}"
        return f"bfloat16 or float32, and chunks and widths that are multiples of 16, got {got}"
    return programs.obstacle(KERNELS if m.summed_inside else KERNELS + SUMS, m)


def is_faster(m: Chunks) -> bool:
    """Whether the fused kernels are faster than einsums, by what was measured: FLASH base with 65,536 tokens a step.

    In TensorFlow causal rows of 512 to 65,536 tokens were faster, and masked ones of 512 and 8,192. On JAX 8 x 8,192
    causal ones were, and 1 x 65,536 were not. Packed causal rows were not measured.
    """
    if (m.c, m.e, m.s) != MEASURED or m.dtype != "bfloat16" or m.tokens < TOKENS:
        return False
    if keras.config.backend() == "jax":
        return m.summed_inside
    return m.orders == ("all",) or (m.plain and m.orders == ("earlier",))


def _with_representation(m, rows):
    """The rows, and their last s columns, whose gradients become columns of one tensor without a pass over the rest."""

    def gradient(*arguments):  # JAX passes the gradients of several results as one tuple
        drows, dz = arguments[0] if len(arguments) == 1 else arguments
        return programs.run("representation_gradient", m, dz, drows)[0]

    return (rows, rows[:, 2 * m.e :]), gradient


def _gated(m, p, bias, weights, q, k, enters, leaves):
    [x] = programs.run("values", m, p, bias, k)
    if not m.summed_inside:
        [x] = programs.run("sums", m, x, enters, leaves)
    [y] = programs.run("gated", m, p, bias, ops.concatenate([weights, q], axis=1), x)
    chunks = lambda z, rows: ops.reshape(z, (m.rows * m.chunks, rows, -1))  # noqa: E731

    def gradient(dy):
        dp, z, of_u = programs.run("gate_gradient", m, p, bias, y, dy)
        [z] = programs.run("gate_sums", m, z, q)
        if not m.summed_inside:
            [z] = programs.run("sums_gradient", m, z, ops.flip(enters, 0), leaves)
        keys = ops.swapaxes(chunks(k, m.c), 1, 2)
        joined = ops.reshape(ops.concatenate([chunks(weights, m.c), keys], axis=1), (-1, m.c))
        dp, of_v = programs.run("value_gradient", m, p, bias, joined, z, dp)
        pairs = ops.einsum("gie,gje->gij", chunks(z, m.depth), chunks(x, m.depth))
        dweights, dq, dkeys = pairs[:, : m.c, : m.c], pairs[:, : m.c, m.c :], pairs[:, m.c :, : m.c]
        narrow = [ops.reshape(x, (m.tokens, -1)) for x in (dweights, dq, ops.swapaxes(dkeys, 1, 2))]
        dbias = ops.concatenate([ops.sum(of_u, 0), ops.sum(of_v, 0)])[None]
        return dp, dbias, *narrow, ops.zeros_like(enters), ops.zeros_like(leaves)

    return y, gradient


def _flags(m: Chunks, found: Operands):
    """`[2, chunks of all rows]` each: 1 where sums enter a chunk from before, or after, and where they leave it."""
    if found.first is None:
        ones = ops.ones((2, m.rows * m.chunks), "float32")
        return ones, ones
    first, last = found.first, found.last
    joined = ops.pad(ops.cast(last[:, :-1] == first[:, 1:], "float32"), [[0, 0], [1, 1]])  # at the chunks' borders
    enters = ops.stack([joined[:, :-1], joined[:, 1:]])
    leaves = ops.cast(first == last, "float32")
    return tuple(ops.reshape(x, (2, -1)) for x in (enters, ops.stack([leaves, leaves])))
