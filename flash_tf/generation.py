"""Text from a causal language model, one token after the other, as one loop that compiles whole."""

import keras
from keras import ops


def greedy(model: keras.Model, tokens, state: dict, steps: int):
    """The likeliest continuation, token by token; see `decode`."""
    return decode(model, tokens, state, steps, lambda logits, step: ops.argmax(logits, axis=-1))


def decode(model: keras.Model, tokens, state: dict, steps: int, choose):
    """Chooses `steps` tokens, each after reading the one before.

    Compiled by XLA, a step reads each weight and the state once, and writes what is new in the state in place. What no
    step changes is made before the loop: matrices in the compute dtype, tables made of weights.

    Args:
      model: A causal language model.
      tokens: Integers `[b]`: the last token of each row, which `state` has not seen.
      state: Of the model's `initial_state` or `extend`.
      steps: How many, a Python integer.
      choose: `(logits [b, V], step) -> integers [b]`; `step` counts from 0, a scalar tensor.

    Returns:
      The chosen tokens, int32 `[b, steps]`; and the state, which has seen all but the last of them.

    Raises:
      ValueError: `steps` is below 1, or the model is not causal.
    """
    if steps < 1:
        raise ValueError(f"decode needs steps >= 1, got {steps}")
    if not model.causal:
        raise ValueError(f"decode needs a causal language model, got {type(model).__name__}")
    held = _held(model)
    with _scope(held):
        prepared = model.prepare(state)

    def body(step, carry):
        tokens, chosen, state = carry
        with _scope(held):
            # Closed before the step and not after it, so that all that reads the state comes after what rewrites it.
            logits, state = model.extend(tokens[:, None], model.close(state), prepared=prepared)
        tokens = ops.cast(choose(logits[:, 0], step), "int32")
        column = ops.cast(ops.arange(steps) == step, "int32")
        return tokens, chosen + tokens[:, None] * column, state

    tokens = ops.cast(tokens, "int32")
    chosen = ops.zeros((tokens.shape[0], steps), "int32")
    _, chosen, state = ops.fori_loop(0, steps, body, (tokens, chosen, state))
    return chosen, model.close(state)


def _held(model):
    """The matrices of a model in its compute dtype, `(weight, tensor, transposed)` each.

    Those of dense layers are held transposed: XLA makes the product of one vector with a matrix a sum over an axis, and
    makes it well over the last axis only.
    """
    matrices = [w for w in model.weights if len(w.shape) == 2 and keras.backend.is_float_dtype(w.dtype)]
    cast = [(w, ops.cast(w, model.compute_dtype), w.name == "kernel") for w in matrices]
    return [(w, ops.transpose(x) if transposed else x, transposed) for w, x, transposed in cast]


def _scope(held):
    """A scope in which each weight is what is held of it."""
    scope = keras.StatelessScope()
    for weight, x, transposed in held:
        scope.add_update((weight, ops.transpose(x) if transposed else x))
    return scope
