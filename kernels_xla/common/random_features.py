"""FAVOR+: positive random features. Their products are the weights of softmax attention on average.

Source: Choromanski et al., "Rethinking Attention with Performers", arXiv:2009.14794, Lemma 1.
"""

from keras import ops

from kernels_xla.common.accumulate import einsum
from kernels_xla.common.spec import KernelSpec, Tensor

# The value of a query's strongest feature. `linear_attention` clamps denominators at 1e-6, which then means 1e-12.
STRONGEST = 1e6


def random_features(x: Tensor, directions: Tensor, *, query: bool = False) -> Tensor:
    """phi(x) = exp(P x' - |x'|^2 / 2), x' = x / s^(1/4).

    Over normal rows of P, the mean of phi(q) phi(k) is exp(q' . k'), the weight of softmax attention. The paper's
    factor 1 / sqrt(r) is left out. It is the same for all features of a query, so it cancels where a sum over keys is
    divided by the sum of their weights.

    Args:
      x: Keys, or queries, `[b, n, h, s]`.
      directions: P, `[r, s]`, the same for all heads.
      query: Whether `x` holds queries. The features of a query are divided by its largest one and multiplied by 1e6.

    Returns:
      `[b, n, h, r]`, in the dtype of `x`, which needs the range of float32.

    Cost:
      O(n h s r) multiply-adds.

    Precision:
      Products are in the dtype of the inputs. Exponents and exponentials are float32.

      The division by its maximum makes a query of any size safe. Keys have no such division. A maximum over all keys
      would let later tokens change earlier ones, and a maximum of each key would change its weight. But
      P_i k' - |k'|^2 / 2 is at most |P_i|^2 / 2. That is 46 for the longest of 128 rows of width 64, and float32 holds
      such sums over a million keys. For rows of width 128 it holds all keys except those that nearly equal such a row.

      A denominator is clamped if the features in which the query is strong add up to less than 1e-12 = e^-27.6 over
      all visible keys. The output then fades to zero. A key at right angles to those rows is this faint from
      |k'| = 7.4 on, which is |k| = 21 at width 64.
    """
    scale = x.shape[-1] ** -0.25
    products = einsum("bnhs,rs->bnhr", x, directions)
    if query:  # the maximum cancels, so it gets no gradient; |q'|^2 cancels too
        # Scaled last: a compiler may fuse a product with the difference, and large products would then not cancel.
        return ops.cast(STRONGEST * ops.exp(scale * (products - _largest(products))), x.dtype)
    square = ops.sum(ops.square(ops.cast(x, products.dtype)), axis=-1, keepdims=True)
    return ops.cast(ops.exp(scale * products - scale**2 / 2 * square), x.dtype)


def _largest(x):
    return ops.stop_gradient(ops.max(x, axis=-1, keepdims=True))


def random_features_reference(x, directions, *, query=False):
    """Keys by a distance: exp(|P_i|^2 / 2 - |x' - P_i|^2 / 2). Queries are divided by their largest feature."""
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
    flops=lambda sizes, case: 2 * sizes["b"] * sizes["n"] * sizes["h"] * sizes["s"] * sizes["r"],
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=(),
    tokenwise=True,
    ranges={"directions": (-1.5, 1.5)},
)
