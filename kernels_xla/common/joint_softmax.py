"""One softmax over two groups of keys: the tokens of a query's own chunk, and summaries of other chunks.

Source: Ren et al., "Combiner: Full Attention Transformer with Sparse Computation Cost", arXiv:2107.05768.
"""

import functools

from keras import ops

from kernels_xla.common import accumulate
from kernels_xla.common.accelerator import on_tpu
from kernels_xla.common.masks import zero_outside
from kernels_xla.common.spec import Tensor

LOW = -1e30  # below every score; exp turns it into 0
TINY = 4  # chunks; from 8 on, matrix products are faster on a TPU


def joint_attention(
    q: Tensor, k: Tensor, v: Tensor, far_k: Tensor, far_v: Tensor, seen: Tensor, far_seen: Tensor
) -> Tensor:
    """Softmax attention of each query to the keys of its chunk and to summaries, under one normalizer.

    Args:
      q: Queries, `[b, g, i, h, s]`.
      k: Keys of the chunk, `[b, g, j, h, s]`.
      v: Their values, `[b, g, j, h, e]`.
      far_k: Keys of the summaries: `[b, m, h, s]`, or `[b, m, i, h, s]` if each query has its own.
      far_v: Values of the summaries, with as many axes.
      seen: Which tokens a query sees, `[i, j]` or `[b, g, i, j]`.
      far_seen: Which summaries a query sees. It has the rank of `[b, g, i, m]` and is broadcast to it.

    Returns:
      `[b, g, i, h, e]`, in the dtype of `v`; 0 for a query that sees nothing.

    Precision:
      Scores and softmax are float32. The weights, and the gradients of the scores, enter their products in the dtype of
      the inputs.
    """
    q = q * ops.cast(q.shape[-1] ** -0.5, q.dtype)
    seen = seen if len(seen.shape) == 2 else ops.expand_dims(seen, 2)  # broadcasts to [b, g, h, i, j]
    far_seen = ops.expand_dims(ops.swapaxes(far_seen, -1, -2), 2)  # broadcasts to [b, g, h, m, i]
    # JAX needs masks as arguments, and it takes only floats as arguments.
    masks = (ops.cast(mask, "float32") for mask in (seen, far_seen))
    return ops.custom_gradient(_with_gradient)(q, k, v, far_k, far_v, *masks)


def _with_gradient(q, k, v, far_k, far_v, *masks):
    """The output, and gradients by hand, as in `softmax_attention`: no axis holds both kinds of keys.

    A derived gradient would join the weights of both kinds and split them again, with a pass over all of them each
    time.
    """
    columns = len(far_k.shape) == 5
    summary = "bmihs" if columns else "bmhs"  # axes of the keys; values have e for s
    value = summary.replace("s", "e")
    tiny = columns and _is_tiny(far_k.shape[1])
    scores, product = (_elementwise, _rounded) if tiny else (accumulate.einsum, ops.einsum)
    by_query = lambda x: ops.expand_dims(ops.transpose(x, (0, 1, 3, 2)), -1)  # noqa: E731  [b, g, h, i] -> [b, g, i, h, 1]
    to_near, to_far = (functools.partial(ops.expand_dims, axis=axis) for axis in (-1, -2))

    near, far = accumulate.einsum("bgihs,bgjhs->bghij", q, k), scores(f"bgihs,{summary}->bghmi", q, far_k)
    seen, far_seen = (mask > 0 for mask in masks)
    near, far = ops.where(seen, near, LOW), ops.where(far_seen, far, LOW)
    largest = ops.maximum(ops.max(near, axis=-1, initial=LOW), ops.max(far, axis=-2, initial=LOW))  # [b, g, h, i]
    near = zero_outside(ops.exp(near - to_near(largest)), seen)
    far = zero_outside(ops.exp(far - to_far(largest)), far_seen)
    total = ops.sum(near, axis=-1) + ops.sum(far, axis=-2)
    total = ops.where(total > 0, total, ops.ones_like(total))
    # A TPU divides after the products, see `softmax_attention`. Elsewhere float16 could overflow in undivided sums.
    if not on_tpu():
        near, far, total = near / to_near(total), far / to_far(total), ops.ones_like(total)
    wide = lambda x: ops.cast(x, total.dtype)  # noqa: E731
    divided = lambda x: ops.cast(wide(x) / by_query(total), x.dtype)  # noqa: E731
    near, far = ops.cast(near, v.dtype), ops.cast(far, v.dtype)
    out = divided(ops.einsum("bghij,bgjhe->bgihe", near, v) + product(f"bghmi,{value}->bgihe", far, far_v))

    def gradient(dout):
        dout = divided(dout)
        dnear = zero_outside(wide(ops.einsum("bgihe,bgjhe->bghij", dout, v)), seen)
        dfar = zero_outside(wide(product(f"bgihe,{value}->bghmi", dout, far_v)), far_seen)
        # Subtracted from terms with the same rounded weights, so that the gradients of a query's scores sum to zero.
        own = (ops.sum(wide(near) * dnear, axis=-1) + ops.sum(wide(far) * dfar, axis=-2)) / total
        dnear = ops.cast(wide(near) * (dnear - to_near(own)), q.dtype)
        dfar = ops.cast(wide(far) * (dfar - to_far(own)), q.dtype)
        dq = ops.einsum("bghij,bgjhs->bgihs", dnear, k) + product(f"bghmi,{summary}->bgihs", dfar, far_k)
        dk, dv = ops.einsum("bghij,bgihs->bgjhs", dnear, q), ops.einsum("bghij,bgihe->bgjhe", near, dout)
        dfar_k = product(f"bghmi,bgihs->{summary}", dfar, q)
        dfar_v = product(f"bghmi,bgihe->{value}", far, dout)
        return dq, dk, dv, dfar_k, dfar_v, *map(ops.zeros_like, masks)

    return out, gradient


def _is_tiny(summaries):
    """Whether products of `[g, m]` matrices, one for each column and head, would be mostly padding on a TPU."""
    return on_tpu() and summaries is not None and summaries <= TINY


def _elementwise(equation, x, y):
    """An einsum without a matrix product, in `sum_dtype`: XLA fuses the products into their sum."""
    (*inputs, out), dtype = equation.replace("->", ",").split(","), accumulate.sum_dtype(x)
    axes = out + "".join(axis for axis in inputs[0] if axis not in out)
    for n, (names, tensor) in enumerate(zip(inputs, (x, y), strict=True)):
        ordered = ops.transpose(ops.cast(tensor, dtype), [names.index(axis) for axis in axes if axis in names])
        missing = [at for at, axis in enumerate(axes) if axis not in names]
        inputs[n] = ops.expand_dims(ordered, missing)
    return ops.sum(inputs[0] * inputs[1], axis=tuple(range(len(out), len(axes))))


def _rounded(equation, x, y):
    return ops.cast(_elementwise(equation, x, y), x.dtype)


def joint_attention_reference(q, k, v, far_k, far_v, seen, far_seen):
    """The same over all pairs of tokens: q, k `[b, n, h, s]`, v `[b, n, h, e]`, summaries alike, masks `[b, i, j]`."""
    both = ops.concatenate([ops.einsum("bihs,bjhs->bhij", q, keys) for keys in (k, far_k)], axis=-1)
    both = both / q.shape[-1] ** 0.5
    sees = ops.cast(ops.concatenate([seen, far_seen], axis=-1)[:, None], v.dtype)
    weights = ops.exp(both - ops.max(both, axis=-1, keepdims=True)) * sees
    total = ops.sum(weights, axis=-1, keepdims=True)
    weights = weights / ops.where(total > 0, total, ops.ones_like(total))
    return ops.einsum("bhij,bjhe->bihe", weights, ops.concatenate([v, far_v], axis=1))
