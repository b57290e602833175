"""Cross-entropy of a language model's head, without the logits of all tokens at once.

The head is the widest layer of a small model. Its logits in float32, with their gradients, would take more memory than
all other activations. Tokens therefore go in blocks, which take turns. Each block computes its gradients in the forward
pass, while its logits exist.
"""

from collections.abc import Callable

from keras import ops

from kernels_xla.common.accumulate import sum_dtype
from kernels_xla.common.spec import Tensor

BLOCK = 2**14  # tokens; 1 GB of bfloat16 logits at 32,000 pieces


def of_block(x: Tensor, table: Tensor, bias: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Loss and gradients of one block: scalar, `[t, d]`, `[V, d]`, `[V]`. See `cross_entropy`; labels are floats."""
    wide = weights.dtype
    logits = ops.cast(ops.matmul(x, ops.transpose(table)) + bias, wide)
    is_label = ops.arange(table.shape[0], dtype="int32")[None] == ops.cast(labels, "int32")[:, None]
    largest = ops.max(logits, axis=-1, keepdims=True)
    normalizer = largest + ops.log(ops.sum(ops.exp(logits - largest), axis=-1, keepdims=True))
    right = ops.sum(ops.where(is_label, logits, ops.zeros((), wide)), axis=-1)
    loss = ops.sum(weights * (normalizer[:, 0] - right))

    surplus = weights[:, None] * (ops.exp(logits - normalizer) - ops.cast(is_label, wide))  # d loss / d logits
    dbias = ops.sum(surplus, axis=0)
    surplus = ops.cast(surplus, x.dtype)
    return loss, ops.matmul(surplus, table), ops.cast(ops.matmul(ops.transpose(surplus), x), wide), dbias


def tokens_of_block(tokens: int, block: int = BLOCK, devices: int = 1) -> int:
    """The tokens of each block of `cross_entropy`, over all devices."""
    each = tokens // devices
    return devices * -(-each // -(-each // block))


def cross_entropy(
    x: Tensor,
    table: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    *,
    block: int = BLOCK,
    devices: int = 1,
    of_block: Callable[..., tuple[Tensor, ...]] = of_block,
) -> Tensor:
    """Sum over tokens t of weights[t] (log sum_j exp(l[t, j]) - l[t, labels[t]]), with logits l = x table^T + bias.

    Args:
      x: Activations, `[t, d]`.
      table: Embeddings, `[V, d]`.
      bias: `[V]`, or None.
      labels: int32 `[t]`, below V.
      weights: `[t]`, float32. A weight of 0 leaves a token out. Weights get no gradient.
      block: The most tokens whose logits exist at the same time on a device; TensorFlow without XLA may take several
        blocks at a time. Blocks have equal sizes.
      devices: How many hold equal parts of the tokens, in order. A block has tokens of each.
      of_block: Computes one block, as the function of this name does.

    Returns:
      A scalar, float32 (float64 for float64). It has first gradients for `x`, `table` and `bias`, no second ones.

    Cost:
      6 t d V multiply-adds, forward and backward together, and O(block V + V d) memory on each device.

    Precision:
      Logits are rounded to the dtype of `x`. Softmax and sums are float32. The operands of the gradients' products are
      in the dtype of `x`.
    """
    wide = sum_dtype(x)
    weights = ops.cast(weights, wide)
    bias = ops.zeros(table.shape[0]) if bias is None else bias
    in_blocks = ops.custom_gradient(lambda *inputs: _in_blocks(*inputs, block, devices, of_block))
    # JAX needs labels as an argument, and it takes only floats as arguments. They are exact below 2^24.
    labels = ops.cast(labels, "float32")
    return in_blocks(x, ops.cast(table, x.dtype), ops.cast(bias, x.dtype), labels, weights)


def _in_blocks(x, table, bias, labels, weights, block, devices, of_block):
    """The loss, and a function that returns its gradients, for `custom_gradient`."""
    size = tokens_of_block(x.shape[0], block, devices)
    if size == x.shape[0]:
        loss, dx, dtable, dbias = of_block(x, table, bias, labels, weights)
    else:
        tokens = [ops.reshape(one, (devices, -1, *one.shape[1:])) for one in (x, labels, weights)]
        loss, dx, dtable, dbias = _in_turn(*tokens, table, bias, size // devices, of_block)

    def gradient(factor):
        scaled = lambda d, like: ops.cast(factor * ops.cast(d, factor.dtype), like.dtype)  # noqa: E731
        return scaled(dx, x), scaled(dtable, table), scaled(dbias, bias), *map(ops.zeros_like, (labels, weights))

    return loss, gradient


def _in_turn(x, labels, weights, table, bias, size, of_block):
    """As `of_block` for inputs `[devices, t, ...]`, in blocks of equal size that take turns in a loop.

    One after the other in the program, they would be compiled as often, and XLA may have the logits of several at once.
    """
    devices, t, d = x.shape
    count = -(-t // size)
    padded = lambda one: ops.pad(one, [(0, 0), (0, count * size - t), *[(0, 0)] * (len(one.shape) - 2)])  # noqa: E731
    parts = [ops.reshape(padded(one), (devices, count, size, *one.shape[2:])) for one in (x, labels, weights)]

    def add(i, sums):
        loss, dx, dtable, dbias = sums
        part, *of_part = (ops.reshape(one[:, i], (devices * size, *one.shape[3:])) for one in parts)
        more, d_part, *others = of_block(part, table, bias, *of_part)
        d_part = ops.reshape(d_part, (devices, 1, size, d))
        return loss + more, ops.slice_update(dx, (0, i, 0, 0), d_part), dtable + others[0], dbias + others[1]

    wide = weights.dtype
    zeros = ops.zeros((), wide), ops.zeros_like(parts[0]), ops.zeros(table.shape, wide), ops.zeros(bias.shape, wide)
    loss, dx, dtable, dbias = ops.fori_loop(0, count, add, zeros)
    dx = ops.reshape(dx, (devices, count * size, d))[:, :t]
    return loss, ops.reshape(dx, (devices * t, d)), dtable, dbias
