"""GAU's attention from the in-projection to the gated values, fused: `silu(u) * gau_attention(..., silu(v))`."""

import keras
from keras import ops

from kernels_pallas import programs
from kernels_pallas.flash import OF_HEADS, with_heads
from kernels_pallas.sizes import Chunks, Pairs, block
from kernels_xla import gau
from kernels_xla.common.chunking import fold
from kernels_xla.common.masks import documents
from kernels_xla.common.rotary import relative_bias
from kernels_xla.common.spec import Tensor

CORE = ["values", "gated", "value_gradient"]
OF_PAIRS = ["weights", "weights_gradient", "relative_gradient", "query_gradient", "key_gradient"]
PART = 256  # tokens of a program of `gate_gradient`
WIDTHS = (1536, 128)  # of values and keys: FLASH-Quad base
SHORTEST = 512  # tokens of a row
LONGEST = {True: 16_384, False: 2048}  # tokens of a row, if causal and if not
TOKENS = {True: 16_384, False: 65_536}  # the fewest of a step


def gated_attention(
    p: Tensor,
    bias: Tensor,
    gammas: Tensor,
    betas: Tensor,
    cos: Tensor,
    sin: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    turned: tuple[bool, ...],
    value_width: int,
    causal: bool = False,
    scale: gau.Scale = "normalized",
    divisor: gau.Divisor = "position",
    padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    offset: int | Tensor = 0,
) -> Tensor:
    """Gated attention: u * A(heads(z), v) for u, v, z = silu(p + bias), where A is the quadratic attention of one head.

    The backward pass keeps p, the activated values, queries, keys, the weights of pairs and the result. It does not
    keep u, scores or the attended values.

    Args:
      p: The in-projection without its bias, `[b, n, 2e + s]`, bfloat16 or float32, of a static shape.
      bias: Its bias, `[2e + s]`.
      gammas: Scales of queries and keys, `[2, s]`.
      betas: Their offsets, `[2, s]`.
      cos: Cosines of `rope_tables`, float32 `[1, n, s / 2]`, or `[b, n, s / 2]`.
      sin: Sines, as `cos`.
      a: See `gau_attention`, as all below.
      b: See `gau_attention`.
      turned: Whether each head is rotated.
      value_width: e.
      causal: Whether position i sees only positions j <= i.
      scale: The place of the divisor.
      divisor: N.
      padding_mask: `[b, n]`, True at real tokens. At padding p must be finite.
      segment_ids: `[b, n]`, 0 at padding.
      offset: Added to the positions of the bias.

    Returns:
      `[b, n, e]`, in the dtype of `p`; 0 at padding.

    Cost:
      As `gau_attention`. Weights are written once and read twice. The gradient of scores is written once and read three
      times. Causal rows have half of all tiles, and those on the diagonal.

    Precision:
      Scores and their gradients are float32 and rounded once. In bfloat16, sigmoids are exact to 2^-11. The gradients
      of the biases of u and v are float32 sums of unrounded numbers.
    """
    (batch, n), e, ids = p.shape[:2], value_width, documents(padding_mask, segment_ids)
    m = sizes(tuple(p.shape), p.dtype, e, causal, turned, cos.shape[0])
    row = lambda x: ops.reshape(fold(x, Pairs.TILE), (x.shape[0] * m.c, *x.shape[2:]))  # noqa: E731
    given = [ops.cast(one, "float32") for one in (bias[2 * e :], gammas, betas)]
    rows, q, k = ops.custom_gradient(lambda *given: with_heads(m.heads, *given))(row(p), *given, row(cos), row(sin))
    at = ops.arange(n, dtype="int32")
    seen = ops.cast(gau.tokens_seen(at, ids, causal, divisor), "float32")
    content, added = gau.factors(ops.broadcast_to(seen, (batch, n)), m.s, scale)
    shares, factors = row(added / content), row(content)  # c q . k + d bias = c (q . k + d / c bias)
    relative = relative_bias(a, b, _distances(m) + offset, ops.zeros((1,), "int32") + offset)[:, 0]
    ids = row(ops.ones((batch, n), "int32") if ids is None else ids)
    tiles = ops.reshape(ids, (-1, Pairs.TILE))
    sole = ops.where(ops.min(tiles, 1) == ops.max(tiles, 1), tiles[:, 0], 0)
    given = q, k, relative, shares, factors, ids, sole
    wide = ops.cast(bias[None, : 2 * e], "float32")
    out = ops.custom_gradient(lambda *given: _gated(m, *given))(rows, wide, *given)
    return ops.reshape(out, (batch, m.c, e))[:, :n]


def sizes(shape: tuple, dtype, value_width: int, causal: bool, turned: tuple[bool, ...], angled: int = 1) -> Chunks:
    """The sizes of the kernels for p of that `shape` `[b, n, 2e + s]`, with angles of so many rows."""
    b, n, width = shape
    return Chunks(
        rows=b,
        chunks=1,
        c=-(-n // Pairs.TILE) * Pairs.TILE,
        t=0,
        e=value_width,
        s=width - 2 * value_width,
        dtype=keras.backend.standardize_dtype(dtype),
        causal=causal,
        orders=(),
        plain=True,
        turned=turned,
        angled=angled,
    )


def obstacle(m: Chunks) -> str | None:
    """Why the fused kernels cannot run, or None."""
    if m.dtype not in ("bfloat16", "float32") or min(block(m.e, 16), m.s) < 16 or m.s & (m.s - 1) or not m.tokens:
        needed = "tokens in bfloat16 or float32, values of a multiple of 16 and keys of a power of 2 from 16"
        return f"{needed}, got {m.tokens:,} in {m.dtype}, values of {m.e}, keys of {m.s}"
    found = programs.obstacle(CORE, m) or programs.obstacle(["gate_gradient"], m.cut(PART))
    return found or programs.obstacle(OF_PAIRS, m.pairs) or programs.obstacle(OF_HEADS, m.heads)


def is_faster(m: Chunks) -> bool:
    """Whether the fused kernels are faster than einsums, by what was measured in bfloat16 in TensorFlow.

    FLASH-Quad base's causal steps were faster in rows of 512 to 16,384 tokens, from 16,384 tokens on. Masked steps of
    65,536 tokens were faster in rows of 512 and 2,048, and slower in rows of 8,192. Smaller ones were slower.
    """
    timed = SHORTEST <= m.c <= LONGEST[m.causal] and m.tokens >= TOKENS[m.causal]
    return timed and keras.config.backend() == "tensorflow" and m.dtype == "bfloat16" and (m.e, m.s) == WIDTHS


def _gated(m, p, bias, q, k, relative, *of_tokens):
    shares, factors, *_ = of_tokens
    at, distances = ops.arange(m.c, dtype="int32"), _distances(m)
    places = ops.maximum(at[:, None] - at[None] - distances[0], 0)
    relative = ops.take(ops.cast(relative, p.dtype), places, axis=0)
    [v] = programs.run("values", m, p, bias)
    [a] = programs.run("weights", m.pairs, q, k, relative, *of_tokens)
    [y] = programs.run("gated", m, p, bias, a, v)

    def gradient(dy):
        dp, z, of_u = programs.run("gate_gradient", m.cut(PART), p, bias, y, dy)
        dp, of_v = programs.run("value_gradient", m, p, bias, a, z, dp)
        [ds] = programs.run("weights_gradient", m.pairs, z, v, a, factors)
        [dq] = programs.run("query_gradient", m.pairs, ds, k)
        [dk] = programs.run("key_gradient", m.pairs, ds, q)
        [of_pairs] = programs.run("relative_gradient", m.pairs, ds, shares)
        keys = at[:, None] - distances[None]  # in a causal row none above the diagonal, where nothing was written
        places = at[:, None] * m.c + ops.clip(keys, 0, m.c - 1)  # XLA computes one index as it reads, but writes two
        of_pairs = ops.take(ops.reshape(of_pairs, (-1,)), places, axis=0)
        drelative = ops.sum(ops.where((keys >= 0) & (keys < m.c), of_pairs, 0.0), axis=0)
        dbias = ops.concatenate([ops.sum(of_u, 0), ops.sum(of_v, 0)])[None]
        return dp, dbias, dq, dk, drelative, *[None for _ in of_tokens]

    return y, gradient


def _distances(m):
    """Distances i - j of the relative bias. It needs no products of pairs."""
    return ops.arange(0 if m.causal else 1 - m.c, m.c, dtype="int32")
