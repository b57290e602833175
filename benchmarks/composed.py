"""cosFormer's and FAVOR+'s attention for `benchmarks.kernels`: features of queries and keys, then linear attention."""

import math

from keras import ops

from flash_tf.layers.mixers.linear_attention import cosine_features
from kernels_xla.common.random_features import SPEC as FEATURES
from kernels_xla.common.spec import KernelSpec
from kernels_xla.linear_attention import LEAST
from kernels_xla.linear_attention import SPEC as LINEAR


def cosformer(q, k, v, **case):
    """cosFormer's attention for texts of at most n tokens (Qin et al., arXiv:2202.08791)."""
    n = q.shape[1]
    q, k = (cosine_features(ops.relu(x), ops.arange(n)[None], n) for x in (q, k))
    return LINEAR.fast(q, k, v, **case)


def cosformer_reference(q, k, v, **case):
    """All pairs j <= i, by weights relu(q_i) . relu(k_j) cos(pi / 2 (i - j) / n) over their sum; 0 where that is 0."""
    n = q.shape[1]
    at = ops.arange(n, dtype=q.dtype)
    near = ops.tril(ops.cos(math.pi / 2 / n * (at[:, None] - at)))
    weights = near * ops.einsum("bihs,bjhs->bhij", ops.relu(q), ops.relu(k))
    total = ops.maximum(ops.sum(weights, axis=-1, keepdims=True), LEAST)
    return ops.einsum("bhij,bjhe->bihe", weights / total, v)


def favor(q, k, v, directions, **case):
    """FAVOR+ (Choromanski et al., arXiv:2009.14794), with the `directions` `[r, s]`."""
    return LINEAR.fast(FEATURES.fast(q, directions, query=True), FEATURES.fast(k, directions), v, **case)


def favor_reference(q, k, v, directions, **case):
    """`favor` by its two references."""
    q, k = FEATURES.reference(q, directions, query=True), FEATURES.reference(k, directions)
    return LINEAR.reference(q, k, v, **case)


def _of_features(name, fast, reference, flops, inputs):
    return KernelSpec(
        name=name,
        fast=fast,
        reference=reference,
        stream=None,
        inputs={"q": "bnhs", "k": "bnhs", "v": "bnhe", **inputs},
        flops=flops,
        state_bytes=LINEAR.state_bytes,
        ranges={name: FEATURES.ranges[name] for name in inputs},
    )


SPECS = {
    "cosformer": _of_features(
        "cosformer",
        cosformer,
        cosformer_reference,
        lambda sizes, case: LINEAR.flops({**sizes, "s": 2 * sizes["s"]}, case),
        {},
    ),
    "favor": _of_features(
        "favor",
        favor,
        favor_reference,
        lambda sizes, case: 2 * FEATURES.flops(sizes, case) + LINEAR.flops({**sizes, "s": sizes["r"]}, case),
        {"directions": "rs"},
    ),
}
