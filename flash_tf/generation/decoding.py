"""Autoregressive decoding as one loop that compiles."""

from collections.abc import Callable, Sequence

import keras
from keras import ops

from kernels_xla.common.spec import Tensor


def greedy(model: keras.Model, tokens: Tensor, state: dict, steps: int) -> tuple[Tensor, dict]:
    """The likeliest continuation, token by token; see `decode`."""
    return decode(model, tokens, state, steps, lambda logits, step: ops.argmax(logits, axis=-1))


def decode(
    model: keras.Model,
    tokens: Tensor,
    state: dict,
    steps: int,
    choose: Callable[[Tensor, Tensor], Tensor],
    stop_tokens: Sequence[int] = (),
) -> tuple[Tensor, dict]:
    """Chooses `steps` tokens, each after reading the one before.

    Compiled by XLA, a step reads each weight and the state once and updates the state in place. Values that no step
    changes are computed before the loop: matrices in the compute dtype, and tables made from weights.

    Args:
      model: A causal language model.
      tokens: Integers `[b]`: the last token of each row, which `state` has not seen.
      state: From the model's `initial_state` or `extend`.
      steps: Number of tokens, a Python integer.
      choose: `(logits [b, V], step) -> integers [b]`; `step` counts from 0, a scalar tensor.
      stop_tokens: Ids that end a row. The loop ends when all rows have ended.

    Returns:
      The chosen tokens, int32 `[b, steps]`, and the state, which has seen all of them except the last. Tokens after a
      stop token are undefined.

    Raises:
      ValueError: `steps` is below 1, or the model is not causal.
    """
    if steps < 1:
        raise ValueError(f"decode needs steps >= 1, got {steps}")
    if not model.causal:
        raise ValueError(f"decode needs a causal language model, got {type(model).__name__}")
    held = cast_weights(model, state)
    chosen, _, state = decode_on(model, held, tokens, state, steps, choose, stop_tokens)
    return chosen, model.flush(state)


def decode_on(
    model: keras.Model,
    held: dict,
    tokens: Tensor,
    state: dict,
    steps: int,
    choose: Callable[[Tensor, Tensor], Tensor],
    stop_tokens: Sequence[int] = (),
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict]:
    """The loop of `decode` on weights from `cast_weights`.

    Args:
      model: As for `decode`, like `tokens`, `steps`, `choose` and `stop_tokens`.
      held: From `cast_weights`.
      tokens: Integers `[b]`.
      state: From `extend` or from this function.
      steps: Columns of the result.
      choose: As for `decode`.
      stop_tokens: As for `decode`.
      count: Tokens to choose, a scalar of at most `steps`; None for all.

    Returns:
      The chosen tokens, int32 `[b, steps]`, 0 after `count`; the last of them, int32 `[b]`; and the state, which needs
      `flush` before its next use.
    """
    end, tokens = steps if count is None else count, ops.cast(tokens, "int32")

    def going_on(step, tokens, chosen, done, state):
        return ops.logical_and(step < end, ops.logical_not(ops.all(done))) if stop_tokens else step < end

    def body(step, tokens, chosen, done, state):
        logits, state = next_logits(model, held, tokens, state)
        tokens = ops.cast(choose(logits, step), "int32")
        column = ops.cast(ops.arange(steps) == step, "int32")
        return (
            step + 1,
            tokens,
            chosen + tokens[:, None] * column,
            ops.logical_or(done, is_one_of(tokens, stop_tokens)),
            state,
        )

    start = (ops.zeros((), "int32"), tokens, ops.zeros((ops.shape(tokens)[0], steps), "int32"), tokens < 0, state)
    _, tokens, chosen, _, state = ops.while_loop(going_on, body, start)
    return chosen, tokens, state


def continuation(
    model: keras.Model,
    logits: Tensor,
    state: dict,
    steps: int,
    choose: Callable[[Tensor, Tensor], Tensor],
    stop_tokens: Sequence[int] = (),
    count: Tensor | None = None,
) -> Tensor:
    """Chooses tokens, int32 `[b, steps]`: the first from `logits [b, V]`, the others as `decode_on` does.

    `count` is how many, a scalar from 1 to `steps`; None for all.
    """
    first = ops.cast(choose(logits, 0), "int32")
    if steps == 1:
        return first[:, None]
    held, later = cast_weights(model, state), lambda logits, step: choose(logits, step + 1)
    left = None if count is None else count - 1
    rest, _, _ = decode_on(model, held, first, state, steps - 1, later, stop_tokens, left)
    return ops.concatenate([first[:, None], rest], axis=1)


def is_one_of(tokens: Tensor, stop_tokens: Sequence[int]) -> Tensor:
    """Whether each token is among some ids."""
    found = [tokens == stop for stop in stop_tokens]
    return ops.any(ops.stack(found), axis=0) if found else tokens < 0


def cast_weights(model: keras.Model, state: dict) -> dict:
    """Tensors that all single steps from `state` share.

    Returns:
      `weights`, the matrices in the compute dtype, and `precomputed`, the results of the mixers' `precompute`. Matrices
      of dense layers are transposed: XLA computes a vector-matrix product as a sum over an axis, and only a sum over
      the last axis is fast.
    """
    cast = [ops.cast(weight, model.compute_dtype) for weight in _matrices(model)]
    weights = [ops.transpose(x) if _is_dense(w) else x for w, x in zip(_matrices(model), cast, strict=True)]
    with _scope(model, weights):
        return {"weights": weights, "precomputed": model.precompute(state)}


def next_logits(model: keras.Model, held: dict, tokens: Tensor, state: dict) -> tuple[Tensor, dict]:
    """Reads one token `[b]` of each row -> logits `[b, V]` and the state, which needs `flush` before its next use.

    Args:
      model: A causal language model.
      held: From `cast_weights`.
      tokens: Integers `[b]`.
      state: From `extend` or from this function. It is flushed first, so that every read follows the update.
    """
    with _scope(model, held["weights"]):
        logits, state = model.extend(tokens[:, None], model.flush(state), precomputed=held["precomputed"])
    return logits[:, 0], state


def _matrices(model):
    return [w for w in model.weights if len(w.shape) == 2 and keras.backend.is_float_dtype(w.dtype)]


def _is_dense(weight):
    return weight.name == "kernel"


def _scope(model, weights):
    """A scope in which each matrix has the value from `cast_weights`."""
    scope = keras.StatelessScope(state_mapping=[(w, w.value) for w in model.weights])  # as any scope around has them
    for weight, x in zip(_matrices(model), weights, strict=True):
        scope.add_update((weight, ops.transpose(x) if _is_dense(weight) else x))
    return scope
