"""FAVOR+: positive random features, whose products are on average softmax attention's weights.

Source: Choromanski et al., "Rethinking Attention with Performers", arXiv:2009.14794, Lemma 1.
"""

from keras import ops

from kernels_xla.common.accumulate import einsum
from kernels_xla.common.spec import KernelSpec, Tensor

# What a query's strongest feature is: then a denominator of 1e-6, where `linear` ends its division, is one of 1e-12.
STRONGEST = 1e6


def random_features(x: Tensor, directions: Tensor, *, query: bool = False) -> Tensor:
    """phi(x) = exp(P x' - |x'|^2 / 2), x' = x / s^(1/4).

    Over normal rows of P the mean of phi(q) phi(k) is exp(q' . k'), the weight of softmax attention. The paper's
    1 / sqrt(r) is left out, as all that a query's features share: it cancels where a sum over keys is divided by the
    sum of their weights.

    Args:
      x: Keys, or queries, `[b, n, h, s]`.
      directions: P, `[r, s]`, the same for all heads.
      query: Whether these are queries, whose features are divided by the largest of their own, times 1e6.

    Returns:
      `[b, n, h, r]`, in the dtype of `x`, which needs the range of float32.

    Cost:
      O(n h s r) multiply-adds.

    Precision:
      Products of the inputs as they are; exponents and exponentials in float32.

      A query's maximum makes one of any size safe. Keys have none: a maximum over keys would let later tokens change
      earlier ones, and one of each key would change its weight. But P_i k' - |k'|^2 / 2 is at most |P_i|^2 / 2: 46 for
      the longest of 128 rows of 64, of which float32 takes sums over a million keys. Of rows of 128 it takes all but
      keys that nearly are such a row.

      Downwards, a denominator meets its floor when, over all keys that are seen, the features in which the query is
      strong add up to less than 1e-12, e^-27.6: then what is read fades to zero. A key at right angles to those rows
      is so faint from |k'| = 7.4 on, which of a width of 64 is |k| = 21.
    """
    scale = x.shape[-1] ** -0.25
    exponent = scale * einsum("bnhs,rs->bnhr", x, directions)
    if query:  # a constant to the gradient, since it cancels, and so does |q'|^2
        return ops.cast(STRONGEST * ops.exp(exponent - _largest(exponent)), x.dtype)
    square = ops.sum(ops.square(ops.cast(x, exponent.dtype)), axis=-1, keepdims=True)
    return ops.cast(ops.exp(exponent - scale**2 / 2 * square), x.dtype)


def _largest(x):
    return ops.stop_gradient(ops.max(x, axis=-1, keepdims=True))


def random_features_reference(x, directions, *, query=False):
    """Of keys the same as a distance: exp(|P_i|^2 / 2 - |x' - P_i|^2 / 2); of queries over their largest."""
    x = x / x.shape[-1] ** 0.25
    if query:
        features = ops.exp(ops.sum(x[..., None, :] * directions, axis=-1))  # [b, n, h, r]
        return STRONGEST * features / _largest(features)
    distances = ops.sum(ops.square(x[..., None, :] - directions), axis=-1)
    return ops.exp((ops.sum(ops.square(directions), axis=-1) - distances) / 2)


SPEC = KernelSpec(
    name="random_features",
    fast=random_features,
    reference=random_features_reference,
    stream=None,
    inputs={"x": "bnhs", "directions": "rs"},
    cases=({}, {"query": True}),
    timed={},
    flops=lambda sizes, case: 2 * sizes["b"] * sizes["n"] * sizes["h"] * sizes["s"] * sizes["r"],
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=(),
    tokenwise=True,
    ranges={"directions": (-1.5, 1.5)},
)
