"""Linear attention with decay in Pallas, through Triton: the weights of a chunk's pairs are made on the chip.

b is the sum of a chunk's log decays up to a token, H the state that enters a chunk, and D the gradient of the state
after it. A `[c, c]` are the weights of a chunk's pairs:

    O  = (q exp(b)) H + A V                          dV = (k exp(b_last - b)) D + A^T dO
    H' = exp(b_last) H + (k exp(b_last - b))^T V     dH = exp(b_last) D + (q exp(b))^T dO        dA = dO V^T

If all channels of a head share a decay, A are the scores q k^T times the decays between tokens. Else each channel has
its own, and the decay exp(b[i] - b[j]) of a pair is a factor of i and a factor of j:

- In a chunk with mild decays the factors are relative to its middle token. No factor is above e^40. A document that
  begins in the chunk has a decay below e^-40 before it, which is not mild.
- Otherwise a pair i > j is taken in the part of the chunk whose halves i and j are on either side of, with factors
  relative to the first token of the second half. No exponent is above 0. In a part, tokens of the second half are
  queries and the others keys. So one matrix X has both, and X X^T are the weights of all parts of one size.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.launching import Plan
from kernels_pallas.sizes import Decayed, block

C = Decayed.CHUNK
LOADS = 8  # chunks whose states a program loads at once
LEAST = -40.0  # a decay below its exponential, 4e-18, is 0, so that one document ends before another begins


def plan(name: str, m: Decayed, interpret: bool) -> Plan:
    """How a kernel runs.

    Args:
      name: "decays": (log decays) -> b. "pairs": (q, k, b) -> A. "added": (k, V, b) -> what each chunk adds to the
        state. "added_later": (q, dO, b) -> what each chunk adds to the gradient of the state before it. "entering":
        (what chunks add, b) -> H, in its place. "entering_later": the same for D, from the last chunk to the first.
        "decayed_sums": (q, V, b, A, H) -> O. "value_sums": (k, dO, b, A, D) -> dV. "pairs_gradient": (V, dO, b) ->
        dA below the diagonal, its transpose above it, and their diagonal. "key_sums": (q, k, V, b, dO, H, D, that)
        -> the gradients of q, k and log decays. A head has columns of its own, and rows of its own in states.
      m: Sizes.
      interpret: Whether Pallas' interpreter runs it.
    """
    del interpret
    kernel, grid, warps = PLANS[name](m)
    stages = 3 if name in ("pairs", "decayed_sums", "value_sums", "key_sums") else 1
    return Plan(functools.partial(kernel, m=m), grid, warps, stages, {0: 0} if "entering" in name else {})


def _wide(x):
    return x.astype(jnp.float32)


def _dot(a, b):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # else Triton rounds to 11 bits
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _times(x, factor):
    """A factor of a product: x times decays, rounded."""
    return (_wide(x) * factor).astype(x.dtype)


def _decay(log):
    return jnp.where(log < LEAST, 0.0, jnp.exp(log))


def _parts(i, size):
    i, size = jnp.asarray(i, jnp.int32), jnp.int32(size)  # JAX with 64 bits counts loops in int64
    return lax.div(i, size), lax.rem(i, size)


def _over(tiles, step, carry):
    """A loop, but not for a single turn."""
    return step(0, carry) if tiles == 1 else lax.fori_loop(0, tiles, step, carry)


def _chunk():
    """The first token of a program's chunk, all of its tokens, and the last."""
    first = pl.program_id(1) * C
    return first, pl.ds(first, C), first + C - 1


def _keys(size, m, first, head, tile):
    """The columns of a tile of a head's keys, of that size, and the rows of its states."""
    chunk, column = lax.div(first, jnp.int32(C)), head * m.s + tile * size
    return pl.ds(column, size), pl.ds(chunk * m.heads * m.s + column, size)


def _log(m, b, at, head, cols):
    """The summed log decays of some tokens, for the columns of keys or, if all share them, for one."""
    return b[at, head][..., None] if m.shared else b[at, cols]


def _pairs_of_tokens():
    """The tokens i and j of all pairs of a chunk, `[c, 1]` and `[1, c]`."""
    return lax.broadcasted_iota(jnp.int32, (C, 1), 0), lax.broadcasted_iota(jnp.int32, (1, C), 1)


def _between(b, rows, head):
    """The decays between all tokens of a chunk, if a head's channels share them."""
    since = b[rows, head]
    return _decay(-jnp.abs(since[:, None] - since[None]))


def _furthest(b, first, cols):
    """The strongest log decay from a chunk's start to its middle token, or from there to its end, without its sign."""
    middle, end = b[first + C // 2, cols], b[first + C - 1, cols]
    return jnp.max(jnp.maximum(-middle, middle - end))


def _by_strength(furthest, mild, strong):
    """`mild()` if no decay from a chunk's start to its middle token or from there to its end is 0, else `strong()`."""
    return lax.cond(furthest < -LEAST, mild, strong)


def _of_middle(b, first, cols):
    """The decays of a chunk's tokens since its middle one, and their inverses."""
    log = b[pl.ds(first, C), cols] - b[first + C // 2, cols][None]
    return jnp.exp(log), jnp.exp(-log)


def _over_halves(m, first, cols, q, k, b, step, carry):
    """Runs `step(taken, queries, factor, X, carry)` for the parts of each size.

    `taken` are the pairs that they take, `queries` the tokens that are queries, and `factor` the tokens' decays.
    """
    (i, j), at = _pairs_of_tokens(), lax.iota(jnp.int32, C)
    own = b[pl.ds(first, C), cols]

    def one(turn, carry):
        size = jnp.int32(C // 2) >> turn  # of a half
        middle = first + ((at & -2 * size) | size)
        factor = _decay(-jnp.abs(own - b[middle, cols]))
        queries = (i & size) != 0
        x = (jnp.where(queries, q, k) * factor).astype(m.dtype)
        return step(((i ^ j) & -size) == size, queries, factor, x, carry)

    return lax.fori_loop(0, C.bit_length() - 1, one, carry)


def _decays(log, b, *, m):
    (_, rows, _), size = _chunk(), _columns(m)
    cols = pl.ds(pl.program_id(0) * size, size)
    b[rows, cols] = jnp.cumsum(log[rows, cols], axis=0)


def _columns(m):
    return block(m.decays, 64)


def _pairs(q, k, b, a, *, m):
    head, (first, rows, _), (i, j) = pl.program_id(0), _chunk(), _pairs_of_tokens()
    at = lambda tile: _keys(m.keys, m, first, head, tile)[0]  # noqa: E731

    def alike(tile, total):
        cols = at(tile)
        return total + _dot(q[rows, cols], k[rows, cols].T)

    def mild(tile, total):
        cols = at(tile)
        queries, keys = _of_middle(b, first, cols)
        return total + _dot(_times(q[rows, cols], queries), _times(k[rows, cols], keys).T)

    def strong(tile, total):
        cols = at(tile)
        of_q, of_k = _wide(q[rows, cols]), _wide(k[rows, cols])
        total = total + jnp.where(i == j, jnp.sum(of_q * of_k, axis=1)[:, None], 0.0)
        add = lambda taken, queries, factor, x, total: total + jnp.where(taken, _dot(x, x.T), 0.0)  # noqa: E731
        return _over_halves(m, first, cols, of_q, of_k, b, add, total)

    tiles = m.s // m.keys
    over = lambda step: _over(tiles, step, jnp.zeros((C, C), jnp.float32))  # noqa: E731
    if m.shared:
        total = over(alike) * _between(b, rows, head)
    else:
        furthest = _over(tiles, lambda tile, x: jnp.maximum(x, _furthest(b, first, at(tile))), jnp.float32(0.0))
        total = _by_strength(furthest, lambda: over(mild), lambda: over(strong))
    a[rows, pl.ds(head * C, C)] = jnp.where(i >= j, total, 0.0).astype(a.dtype)


def _across(m, x, b, rows, last, head, cols, queries):
    """Queries with their decay since the chunk's start, or keys with their decay until its end."""
    since = _log(m, b, rows, head, cols)
    log = since if queries else _log(m, b, last, head, cols)[None] - since
    return _times(x[rows, cols], _decay(log))


def _added(x, y, b, sums, *, m, later=False):
    size = _value_columns(m)
    tile, of_values = _parts(pl.program_id(0), m.e // size)
    head, tile = _parts(tile, m.s // m.keys)
    first, rows, last = _chunk()
    cols, states = _keys(m.keys, m, first, head, tile)
    values = y[rows, pl.ds(head * m.e + of_values * size, size)]
    x = _across(m, x, b, rows, last, head, cols, later)
    found = _dot(x.T, values) if m.keys >= 64 else _dot(values.T, x).T  # a fast product has 64 rows
    sums[states, pl.ds(of_values * size, size)] = found.astype(sums.dtype)


def _value_columns(m):
    return block(m.e, 128)


def _entering(added, b, states, *, m, later=False):
    """Writes y = carry, and goes on with carry = own + decay y, chunk after chunk in the order of the sums."""
    (size, columns), loads = _state_tile(m), block(m.chunks, LOADS)
    cols, first, row = pl.ds(pl.program_id(0) * columns, columns), pl.program_id(1) * size, pl.program_id(2)
    head, _ = _parts(first, m.s)

    def step(i, carry):
        chunks = [i * loads + j for j in range(loads)]
        chunks = [row * m.chunks + (m.chunks - 1 - chunk if later else chunk) for chunk in chunks]
        at = [pl.ds(chunk * m.heads * m.s + first, size) for chunk in chunks]
        own = [_wide(added[rows, cols]) for rows in at]
        decays = [_decay(_log(m, b, chunk * C + C - 1, head, pl.ds(first, size)))[:, None] for chunk in chunks]
        for rows, new, decay in zip(at, own, decays, strict=True):
            states[rows, cols] = carry.astype(states.dtype)
            carry = new + decay * carry
        return carry

    lax.fori_loop(0, m.chunks // loads, step, jnp.zeros((size, columns), jnp.float32))


def _state_tile(m):
    return block(m.s, 4), block(m.e, 128)


def _sums(x, y, b, a, states, out, *, m, later=True):
    size = _value_columns(m)
    head, tile = _parts(pl.program_id(0), m.e // size)
    first, rows, last = _chunk()
    of_values, cols = pl.ds(tile * size, size), pl.ds(head * m.e + tile * size, size)

    def step(tile, total):
        of_keys, of_states = _keys(m.keys, m, first, head, tile)
        return total + _dot(_across(m, x, b, rows, last, head, of_keys, later), states[of_states, of_values])

    total = _over(m.s // m.keys, step, jnp.zeros((C, size), jnp.float32))
    weights = a[rows, pl.ds(head * C, C)]
    out[rows, cols] = (total + _dot(weights if later else weights.T, y[rows, cols])).astype(out.dtype)


def _pairs_gradient(v, dout, b, both, *, m):
    head, (_, rows, _), (i, j) = pl.program_id(0), _chunk(), _pairs_of_tokens()

    def step(tile, total):
        cols = pl.ds(head * m.e + tile * m.values, m.values)
        return total + _dot(dout[rows, cols], v[rows, cols].T)

    total = _over(m.e // m.values, step, jnp.zeros((C, C), jnp.float32))
    total = (total * _between(b, rows, head) if m.shared else total).astype(both.dtype)
    earlier = jnp.where(i > j, total, jnp.zeros((), both.dtype))
    both[rows, pl.ds(head * C, C)] = jnp.where(i == j, total, earlier + earlier.T)


def _key_sums(q, k, v, b, dout, states, later, both, dq, dk, dlog, *, m):
    size = _key_columns(m)
    head, tile = _parts(pl.program_id(0), m.s // size)
    first, rows, last = _chunk()
    cols, of_states = _keys(size, m, first, head, tile)
    left, right, whole = _of_other_chunks(m, v, dout, states, later, head, rows, of_states)
    pairs, q, k = both[rows, pl.ds(head * C, C)], q[rows, cols], k[rows, cols]
    own, end = _log(m, b, rows, head, cols), _log(m, b, last, head, cols)

    def mild():
        middle = b[first + C // 2, cols]
        missing = _decay(middle)[None], _decay(end - middle)[None]
        return _direct(pairs, q, k, _of_middle(b, first, cols), left, right, missing)

    def strong():
        of_q, of_k, since, until = _wide(q), _wide(k), _decay(own), _decay(end[None] - own)
        same = jnp.sum(_wide(_only(lambda i, j: i == j, pairs)), axis=1)[:, None]  # these have no decay
        of_later = _wide(_times(k, until)) * right

        def add(taken, queries, factor, x, carry):
            of_queries, of_keys, change = carry
            found = _dot(jnp.where(taken, pairs, jnp.zeros((), pairs.dtype)), x)
            own, found = _wide(x) * found, found * factor
            of_queries, of_keys = of_queries + jnp.where(queries, found, 0.0), of_keys + jnp.where(queries, 0.0, found)
            return of_queries, of_keys, change + jnp.where(queries, own, -own)

        change = _wide(_times(q, since)) * left - of_later
        carry = left * since + same * of_k, right * until + same * of_q, change
        return *_over_halves(m, first, cols, of_q, of_k, b, add, carry), of_later

    if m.shared:
        one = jnp.ones((1, 1), jnp.float32)
        found = _direct(pairs, q, k, (one, one), left, right, (_decay(own), _decay(end[None] - own)))
    else:
        found = _by_strength(_furthest(b, first, cols), mild, strong)
    of_queries, of_keys, change, of_later = found
    dq[rows, cols], dk[rows, cols] = of_queries.astype(dq.dtype), of_keys.astype(dk.dtype)
    whole = whole * _decay(end) + jnp.sum(of_later, axis=0)  # of all later decays' logarithms
    if m.shared:  # and summed over the tiles outside
        whole, change = jnp.sum(whole), jnp.sum(change, axis=1)
        dlog[tile, rows, head] = whole + jnp.sum(change) - jnp.cumsum(change, axis=0) + change
    else:
        dlog[rows, cols] = (whole + jnp.sum(change, axis=0))[None] - jnp.cumsum(change, axis=0) + change


def _of_other_chunks(m, v, dout, states, later, head, rows, of_states):
    """The products dO H^T and V D^T, without decays, and H times D, summed over a head's values."""

    def step(tile, carry):
        left, right, whole = carry
        of_values, at = pl.ds(tile * m.values, m.values), pl.ds(head * m.e + tile * m.values, m.values)
        state, after = states[of_states, of_values], later[of_states, of_values]
        whole = whole + jnp.sum(_wide(state) * _wide(after), axis=1)
        return left + _dot(dout[rows, at], state.T), right + _dot(v[rows, at], after.T), whole

    empty = jnp.zeros((C, of_states.size), jnp.float32)
    return _over(m.e // m.values, step, (empty, empty, jnp.zeros((of_states.size,), jnp.float32)))


def _direct(pairs, q, k, factors, left, right, missing):
    """The gradients of a chunk whose pairs are one product.

    Args:
      pairs: Their gradients, and the transpose.
      q: Queries.
      k: Keys.
      factors: The decays that q and k have in the product.
      left: What the chunk's queries get from earlier chunks, without decays.
      right: What its keys get from later ones.
      missing: The decays of both that `factors` lack.

    Returns:
      dq, dk, q dq - k dk, and the part of k dk from later chunks.
    """
    x, y = (_times(own, factor) for own, factor in zip((q, k), factors, strict=True))
    of_later = right * missing[1]
    of_queries = left * missing[0] + _dot(_only(lambda i, j: i >= j, pairs), y)
    of_keys = of_later + _dot(_only(lambda i, j: i <= j, pairs), x)
    # q dq and k dk cancel, so they take the factors as the product has them, rounded.
    x, y = _wide(x), _wide(y)
    return of_queries * factors[0], of_keys * factors[1], x * of_queries - y * of_keys, y * of_later


def _only(which, pairs):
    return jnp.where(which(*_pairs_of_tokens()), pairs, jnp.zeros((), pairs.dtype))


def _key_columns(m):
    return m.keys if m.shared else block(m.s, 32)  # with a decay for each channel, 64 do not fit into registers


# For each kernel, of the sizes: the function, its grid, and the warps of a program.
_GRID = lambda m, tiles: (m.heads * tiles, m.rows * m.chunks)  # noqa: E731
_ADDED = lambda m: _GRID(m, m.s // m.keys * (m.e // _value_columns(m)))  # noqa: E731
_STATES = lambda m: (m.e // _state_tile(m)[1], m.heads * m.s // _state_tile(m)[0], m.rows)  # noqa: E731
PLANS = {
    "decays": lambda m: (_decays, (m.decays // _columns(m), m.rows * m.chunks), 2),
    "pairs": lambda m: (_pairs, _GRID(m, 1), 4),
    "added": lambda m: (_added, _ADDED(m), 4),
    "added_later": lambda m: (functools.partial(_added, later=True), _ADDED(m), 4),
    "entering": lambda m: (_entering, _STATES(m), 1),
    "entering_later": lambda m: (functools.partial(_entering, later=True), _STATES(m), 1),
    "decayed_sums": lambda m: (_sums, _GRID(m, m.e // _value_columns(m)), 4),
    "value_sums": lambda m: (functools.partial(_sums, later=False), _GRID(m, m.e // _value_columns(m)), 4),
    "pairs_gradient": lambda m: (_pairs_gradient, _GRID(m, 1), 2),
    "key_sums": lambda m: (_key_sums, _GRID(m, m.s // _key_columns(m)), 4),
}
