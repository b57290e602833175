"""Kernelized attention through a few random queries and keys: Nystrom's method on the Gaussian kernel.

Source: Chen et al., "Skyformer", arXiv:2111.00035, section 4. Ridge and preconditioning follow the authors' code.
"""

from keras import ops

from kernels_xla.common.landmarks import draws, flops, gathered, gaussian, numbers, positions_of, pseudo_inverse, real
from kernels_xla.common.masks import zero_outside
from kernels_xla.common.spec import KernelSpec, Tensor

RIDGE = 0.1  # the authors' value


def skyformer_attention(
    q: Tensor, k: Tensor, v: Tensor, *, landmarks: int, seed: int, padding_mask: Tensor | None = None
) -> Tensor:
    """K(q, S) (K(S, S) + 0.1)^-1 K(S, k) v, for each head; K is `kernels_xla.common.landmarks.gaussian`.

    S holds `landmarks` queries and keys of real tokens. Row t is number `draws(seed)[t]` modulo 2m of the m queries
    followed by the m keys [our rule; the authors draw anew in each step]. Before `pseudo_inverse`, rows and columns of
    the matrix are divided by the square roots of their sums.

    Args:
      q: Queries, `[b, n, h, s]`.
      k: Keys, `[b, n, h, s]`.
      v: Values, `[b, n, h, e]`.
      landmarks: t, the number of rows of S.
      seed: Seed of the rows.
      padding_mask: `[b, n]`, True at real tokens.

    Returns:
      `[b, n, h, e]`, in the dtype of `v`; 0 at padding.

    Cost:
      O(n t h (s + e) + t^3 h) multiply-adds, O(n t h) memory: linear in n.

    Precision:
      Kernels, the inverse and its products are float32. Products over tokens are in the dtype of `v`. Distances are as
      in `kernelized_attention`.
    """
    q, k, v = (real(x, padding_mask) for x in (q, k, v))
    count = ops.maximum(numbers(v, padding_mask)[1], 1)[:, None]
    drawn = ops.convert_to_tensor(draws(seed, landmarks))[None] % (2 * count)
    drawn = ops.broadcast_to(drawn, (ops.shape(v)[0], landmarks))
    at = positions_of(drawn % count, padding_mask)
    some = ops.where((drawn < count)[..., None, None], gathered(q, at), gathered(k, at))  # [b, t, h, s]
    middle = gaussian(some, some)
    middle = middle + RIDGE * ops.eye(landmarks, dtype=middle.dtype)
    root = ops.rsqrt(ops.sum(middle, axis=-1))
    across = root[..., None] * root[..., None, :]
    inverse = pseudo_inverse(middle * across) * across
    seen = None if padding_mask is None else padding_mask[:, None, None]
    weights = ops.cast(zero_outside(gaussian(some, k), seen), v.dtype)
    told = ops.einsum("bhij,bjhe->bihe", weights, v)  # [b, t, h, e]
    told = ops.einsum("bhij,bjhe->bihe", inverse, ops.cast(told, inverse.dtype))
    out = ops.einsum("bhij,bjhe->bihe", ops.cast(gaussian(q, some), v.dtype), ops.cast(told, v.dtype))
    return real(out, padding_mask)


def skyformer_attention_reference(q, k, v, *, landmarks, seed, padding_mask=None):
    """The three matrices from explicit distances. A matrix of zeros and ones picks the rows of S."""
    dtype, (b, n) = v.dtype, v.shape[:2]
    there = ops.ones((b, n), "int32") if padding_mask is None else ops.cast(padding_mask, "int32")
    count = ops.maximum(ops.sum(there, axis=1, keepdims=True), 1)
    number = ops.cumsum(there, axis=1) - 1
    drawn = draws(seed, landmarks)[None] % (2 * count)  # [b, t]
    numbered = ops.concatenate([number, number + count], axis=1)[:, None] == drawn[..., None]  # [b, t, 2n]
    chosen = ops.cast(numbered & (ops.tile(there, (1, 2)) > 0)[:, None], dtype)
    some = ops.einsum("btm,bmhs->bths", chosen, ops.concatenate([q, k], axis=1))

    def kernel(x, y):
        distances = ops.sum((x[:, :, None] - y[:, None]) ** 2, axis=-1)
        return ops.transpose(ops.exp(-distances / (2 * q.shape[-1] ** 0.5)), (0, 3, 1, 2))

    middle = kernel(some, some) + RIDGE * ops.eye(landmarks, dtype=dtype)
    root = ops.sum(middle, axis=-1) ** -0.5
    across = root[..., None] * root[..., None, :]
    inverse = across * pseudo_inverse(across * middle)
    weights = kernel(q, some) @ inverse @ (kernel(some, k) * ops.cast(there, dtype)[:, None, None])
    return ops.einsum("bhij,bjhe->bihe", weights * ops.cast(there, dtype)[:, None, :, None], v)


SPEC = KernelSpec(
    name="skyformer",
    fast=skyformer_attention,
    reference=skyformer_attention_reference,
    stream=None,
    inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe"},
    flops=flops,
    state_bytes=lambda sizes, case, itemsize: 0,
    masks=("padding_mask",),
)
