"""Beam search: several continuations of each text grow side by side, and the likeliest stay."""

import dataclasses
import numbers
from collections.abc import Sequence

import keras
from keras import ops

from flash_tf.generation.decoding import cast_weights, is_one_of, next_logits
from kernels_xla.common.spec import Tensor


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """Grows `width` continuations together and returns the likeliest.

    The sum of log-probabilities decides which continuations stay in the beam. At the end, the best one has the highest
    sum divided by length^length_penalty. The length includes the stop token.

    Args:
      width: Number of continuations in the beam.
      length_penalty: 0 compares sums, 1 compares means; larger values favour longer texts.

    Raises:
      ValueError: The width is no integer of 1 or more.
    """

    width: int = 4
    length_penalty: float = 1.0

    def __post_init__(self):
        if not isinstance(self.width, numbers.Integral) or self.width < 1:
            raise ValueError(f"a beam's width must be an integer of 1 or more, got {self.width!r}")
        object.__setattr__(self, "width", int(self.width))

    def __call__(
        self,
        model: keras.Model,
        logits: Tensor,
        state: dict,
        steps: int,
        stop_tokens: Sequence[int] = (),
        count: Tensor | None = None,
    ) -> Tensor:
        """Continues each row.

        Args:
          model: A causal language model.
          logits: `[b, V]`, after the last token that `state` has seen.
          state: The decoding state of `b` rows.
          steps: Columns of the result, a Python integer.
          stop_tokens: Ids that end a row.
          count: Tokens to choose, a scalar from 1 to `steps`; None for all.

        Returns:
          The best continuation of each row, int32 `[b, steps]`. Tokens after a stop token are undefined; 0 after
          `count`.

        Raises:
          ValueError: The beam is wider than the vocabulary.
        """
        (rows, size), end = logits.shape, steps if count is None else count
        if self.width > size:
            raise ValueError(f"a beam of width {self.width} needs as many tokens in the vocabulary, which has {size}")
        state = {name: ops.repeat(x, self.width, axis=0) for name, x in state.items()}
        held = cast_weights(model, state)
        scores, tokens = ops.top_k(_log_softmax(logits), self.width)  # [b, w]
        tokens = ops.cast(tokens, "int32")
        column = lambda step: ops.cast(ops.arange(steps) == step, "int32")  # noqa: E731
        chosen = tokens[..., None] * column(0)
        lengths, done = ops.ones_like(tokens), is_one_of(tokens, stop_tokens)
        # A beam that has ended keeps its score: one of its continuations costs nothing, and the others are impossible.
        stays = ops.where(ops.arange(size) == 0, 0.0, -ops.convert_to_tensor(float("inf"), scores.dtype))

        def going_on(step, tokens, chosen, scores, lengths, done, state):
            return ops.logical_and(step < end, ops.logical_not(ops.all(done))) if stop_tokens else step < end

        def body(step, tokens, chosen, scores, lengths, done, state):
            logits, state = next_logits(model, held, ops.reshape(tokens, (-1,)), state)
            nexts = ops.where(done[..., None], stays, ops.reshape(_log_softmax(logits), (rows, self.width, size)))
            scores, best = ops.top_k(ops.reshape(scores[..., None] + nexts, (rows, self.width * size)), self.width)
            parents, tokens = ops.cast(best // size, "int32"), ops.cast(best % size, "int32")
            at = ops.reshape(parents + self.width * ops.arange(rows, dtype="int32")[:, None], (-1,))
            state = {name: ops.take(x, at, axis=0) for name, x in state.items()}
            chosen = ops.take_along_axis(chosen, parents[..., None], axis=1)
            lengths, done = (ops.take_along_axis(x, parents, axis=1) for x in (lengths, done))
            chosen = chosen + ops.where(done, 0, tokens)[..., None] * column(step)
            lengths = lengths + ops.cast(ops.logical_not(done), "int32")
            done = ops.logical_or(done, is_one_of(tokens, stop_tokens))
            return step + 1, tokens, chosen, scores, lengths, done, state

        start = (ops.ones((), "int32"), tokens, chosen, scores, lengths, done, state)
        _, _, chosen, scores, lengths, _, _ = ops.while_loop(going_on, body, start)
        value = scores / ops.cast(lengths, scores.dtype) ** self.length_penalty
        best = ops.argmax(value, axis=-1)
        return ops.take_along_axis(chosen, best[:, None, None], axis=1)[:, 0]


def _log_softmax(logits):
    return ops.log_softmax(ops.cast(logits, "float32"), axis=-1)
