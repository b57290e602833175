"""FLASH's core from the in-projection to the gated values, fused: `silu(u) * mixed_chunk_attention(..., silu(v))`."""

import keras
from keras import ops

from kernels_pallas import programs
from kernels_pallas.sizes import Chunks, block
from kernels_xla.common.chunking import fold
from kernels_xla.common.masks import documents
from kernels_xla.common.spec import Tensor
from kernels_xla.flash.operands import Operands, operands

KERNELS = ["values", "gated", "gate_gradient", "gate_sums", "value_gradient"]
SUMS = ["sums", "sums_gradient"]
OF_HEADS = ["heads", "heads_gradient"]
BASE = (256, 1536, 128)  # tokens of a chunk, and widths of values and keys: FLASH base
TOKENS = {("earlier",): 8_192, ("all",): 16_384}  # by `orders`: of its smallest step on one device, in TensorFlow
CHUNKS, VALUES, KEYS = (128, 256, 512), (1024, 2048), 128  # other sizes: of a chunk; of values, from and to; of keys
LARGE = 65_536  # tokens of a step with other sizes, with packed documents, or on JAX


def gated_mixed_chunk_attention(
    p: Tensor,
    bias: Tensor,
    gammas: Tensor,
    betas: Tensor,
    cos: Tensor,
    sin: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    turned: tuple[bool, ...],
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
      gammas: Scales of the four heads of `mixed_chunk_attention`, in its order, `[4, s]`.
      betas: Their offsets, `[4, s]`.
      cos: Cosines of `rope_tables`, float32 `[1, n, s / 2]`, or `[b, n, s / 2]`.
      sin: Sines, as `cos`.
      a: See `mixed_chunk_attention`, as all below.
      b: See `mixed_chunk_attention`.
      turned: Whether each head is rotated.
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
    m = sizes(tuple(p.shape), p.dtype, e, chunk_size, causal, segment_ids is not None, turned, cos.shape[0])
    rows = ops.reshape(fold(p, chunk_size), (m.tokens, m.width))
    given = [ops.cast(one, "float32") for one in (bias[2 * e :], gammas, betas)]
    given += [ops.reshape(fold(one, chunk_size), (m.heads.positions, m.heads.half)) for one in (cos, sin)]
    rows, *heads = ops.custom_gradient(lambda *given: with_heads(m.heads, *given))(rows, *given)
    heads = [ops.reshape(one, (m.rows, m.chunks * m.c, m.s))[:, :n] for one in heads]
    options = {"chunk_size": chunk_size, "causal": causal, "scale": scale, "chunk_divisor": chunk_divisor}
    found = operands(*heads, a=a, b=b, **options, ids=ids, packed=segment_ids is not None, offset=offset)
    wide = ops.cast(bias[None, : 2 * e], "float32")
    reads = ops.reshape(ops.concatenate([found.weights, found.q], axis=-1), (m.tokens, m.depth))
    keys = ops.reshape(found.k, (m.tokens, m.t))
    out = ops.custom_gradient(lambda *given: _gated(m, *given))(rows, wide, reads, keys, *_flags(m, found))
    return ops.reshape(out, (m.rows, -1, e))[:, :n]


def sizes(
    shape: tuple,
    dtype,
    value_width: int,
    chunk_size: int,
    causal: bool,
    packed: bool,
    turned: tuple[bool, ...],
    angled: int = 1,
) -> Chunks:
    """The sizes of the kernels for p of that `shape` `[b, n, 2e + s]`, with angles of so many rows."""
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
        turned=turned,
        angled=angled,
    )


def obstacle(m: Chunks) -> str | None:
    """Why the fused kernels cannot run, or None."""
    least = min(block(size, 16) for size in (m.c, m.e, m.s))
    if m.dtype not in ("bfloat16", "float32") or least < 16 or m.s & (m.s - 1) or not m.tokens:
        needed = "tokens in bfloat16 or float32, chunks and values of a multiple of 16, and keys of a power of 2"
        return f"{needed} from 16, got {m.tokens:,} in {m.dtype}, chunks of {m.c}, values of {m.e}, keys of {m.s}"
    found = programs.obstacle(KERNELS if m.summed_inside else KERNELS + SUMS, m)
    return found or programs.obstacle(OF_HEADS, m.heads)


def is_faster(m: Chunks) -> bool:
    """Whether the fused kernels are faster than einsums, by what was measured in bfloat16.

    FLASH base's in TensorFlow: causal steps of 8,192 to 65,536 tokens were faster, the largest in rows of 512 to 65,536
    and others in rows of 1,024 or 8,192. Masked steps of 16,384 to 65,536 were too, and steps of 65,536 with packed
    documents, causal and masked. On JAX 8 x 8,192 causal tokens were, and 1 x 65,536 were not. Other sizes, in
    TensorFlow: with chunks of 128 or 512, or values of 1,024 or 2,048, causal steps of 65,536 tokens were, in 8 and 32
    rows.
    """
    is_base = (m.c, m.e, m.s) == BASE
    near = m.c in CHUNKS and VALUES[0] <= m.e <= VALUES[1] and m.s == KEYS and m.columns == 64 and m.summed_inside
    if m.dtype != "bfloat16" or not (is_base or near):
        return False
    if keras.config.backend() == "jax":
        return is_base and m.summed_inside and m.tokens >= LARGE
    return m.tokens >= (TOKENS[m.orders] if is_base and m.plain else LARGE)


def with_heads(m, rows, bias, gammas, betas, cos, sin):
    """The rows, and the heads, whose gradients become columns of one tensor without a pass over the rest."""
    heads = programs.run("heads", m, rows, bias, gammas, betas, cos, sin)

    def gradient(*arguments):  # JAX passes the gradients of several results as one tuple
        drows, *dheads = arguments[0] if len(arguments) == 1 else arguments
        drows, sums = programs.run("heads_gradient", m, rows, bias, gammas, cos, sin, *dheads, drows)
        dgammas, dbetas, dbias = ops.split(ops.sum(sums, axis=0), [len(dheads), 2 * len(dheads)], axis=0)
        return drows, dbias[0], dgammas, dbetas, ops.zeros_like(cos), ops.zeros_like(sin)

    return (rows, *heads), gradient


def _gated(m, p, bias, reads, keys, enters, leaves):
    [x] = programs.run("values", m, p, bias, keys)
    if not m.summed_inside:
        [x] = programs.run("sums", m, x, enters, leaves)
    [y] = programs.run("gated", m, p, bias, reads, x)

    def gradient(dy):
        dp, z, of_u = programs.run("gate_gradient", m, p, bias, y, dy)
        [z] = programs.run("gate_sums", m, z, reads)
        if not m.summed_inside:
            [z] = programs.run("sums_gradient", m, z, ops.flip(enters, 0), leaves)
        dp, of_v = programs.run("value_gradient", m, p, bias, reads, z, dp, keys)
        z, wide = (ops.reshape(one, (m.rows * m.chunks, m.depth, m.e)) for one in (z, x))
        pairs = ops.einsum("gie,gje->gij", z, wide)  # [dA dQ; dK^T .]
        dreads = ops.reshape(pairs[:, : m.c], (m.tokens, m.depth))
        dkeys = ops.reshape(ops.swapaxes(pairs[:, m.c :, : m.c], 1, 2), (m.tokens, m.t))
        dbias = ops.concatenate([ops.sum(of_u, 0), ops.sum(of_v, 0)])[None]
        return dp, dbias, dreads, dkeys, ops.zeros_like(enters), ops.zeros_like(leaves)

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
