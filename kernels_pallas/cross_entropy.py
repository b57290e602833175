"""The head's loss of a block of tokens, fused: three passes over the logits, where einsums take five or more."""

import keras
from keras import ops

from kernels_pallas import programs
from kernels_pallas.sizes import Logits
from kernels_xla.common.spec import Tensor

KERNELS = ["normalizers", "surplus"]
NARROWEST = 64  # columns of a tile
FEWEST, MOST = 32_000, 50_304  # ids of the vocabularies that were timed
TOKENS = 8_192  # of the smallest block that was timed with the fewest
LARGE = 16_384  # of those with more


def of_block(
    x: Tensor, table: Tensor, bias: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`kernels_xla.common.cross_entropy.of_block`, in bfloat16 or float32, of a static shape.

    Args:
      x: Activations, `[t, d]`.
      table: Embeddings, `[V, d]`, in the dtype of `x`.
      bias: `[V]`, in the dtype of `x`.
      labels: float32 `[t]`, whole numbers below V.
      weights: `[t]`, float32.

    Returns:
      The loss, float32, and its gradients for `x`, `table` (float32) and `bias` (float32).

    Cost:
      As einsums have, but two passes that read the logits and one that writes their gradient in their place.

    Precision:
      As einsums have.
    """
    t, step = x.shape[0], Logits.STEP
    m = sizes(t, table.shape[0], x.dtype)
    padded = lambda one: ops.pad(one, [(0, -t % step), *[(0, 0)] * (len(one.shape) - 1)])  # noqa: E731
    x, labels, padded_weights = map(padded, (x, labels, weights))
    logits = ops.matmul(x, ops.transpose(table))
    normalizers, right = programs.run("normalizers", m, logits, bias, labels)
    surplus, sums = programs.run("surplus", m, logits, bias, labels, padded_weights, normalizers)
    dtable = ops.cast(ops.matmul(ops.transpose(surplus), x), "float32")
    loss = ops.sum(weights * (normalizers - right)[:t])  # padding's may be infinite
    return loss, ops.matmul(surplus, table)[:t], dtable, ops.sum(sums, axis=0)


def sizes(tokens: int, vocabulary: int, dtype) -> Logits:
    """The sizes of the kernels for a block of so many tokens, which get some of weight 0 to a multiple of `STEP`."""
    dtype = keras.backend.standardize_dtype(dtype)
    return Logits(tokens=-(-tokens // Logits.STEP) * Logits.STEP, vocabulary=vocabulary, dtype=dtype)


def obstacle(m: Logits) -> str | None:
    """Why the fused kernels cannot run, or None."""
    if m.dtype not in ("bfloat16", "float32") or m.columns < NARROWEST:
        got = f"{m.dtype}, {m.vocabulary:,} ids"
        return f"bfloat16 or float32, and a vocabulary that is a multiple of {NARROWEST}, got {got}"
    return programs.obstacle(KERNELS, m)


def is_faster(m: Logits) -> bool:
    """Whether the fused kernels are faster than einsums, by what was measured: bfloat16, in TensorFlow.

    With 32,000 ids causal steps of 65,536 tokens, of blocks of 16,384, were faster by 2 to 6 %, and masked ones, of
    9,832, by 1 %. A causal step of 8,192 tokens was faster with this kernel and FLASH's and the norm's together. With
    32,128 and 50,304 ids, columns of 128, blocks of 16,384 tokens were.
    """
    known = FEWEST <= m.vocabulary <= MOST and m.columns >= 128 and m.dtype == "bfloat16"
    large = m.tokens >= (TOKENS if m.vocabulary == FEWEST else LARGE)
    return keras.config.backend() == "tensorflow" and known and large
