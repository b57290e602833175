"""Generation for batches of prompts, compiled once for each size."""

import math
import numbers
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from flash_tf.generation.beam import BeamSearch
from flash_tf.generation.decoding import cast_weights, continuation, decode_on
from flash_tf.generation.samplers import GREEDY, Sampler
from flash_tf.layers.traced_once import apart, forward_only

FINEST = 32  # prompts, and room for new tokens, are a multiple of this, if they are not long
MOST = 2**63 - 1  # the largest seed
FEW = 4  # tokens that `stream` chooses in one call of a program
SAMPLERS = {"greedy": GREEDY, "sample": Sampler(), "beam": BeamSearch()}


class Generator:
    """Continues prompts with a causal language model, and keeps the compiled programs.

    Prompts are padded on the right. Each prompt begins at position 0, so its chunks are the same as in training.
    Padding does not change a row's state, so a row's continuation does not depend on the other rows.

    Args:
      model: A causal language model.
    """

    def __init__(self, model: keras.Model):
        self._model, self._programs = model, Programs(model)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        sampler: str | Sampler | BeamSearch = "greedy",
        seed: int = 0,
        stop_tokens: Sequence[int] = (),
    ) -> list[list[int]]:
        """The continuation of each prompt; see `CausalLM.generate`."""
        chosen_by = _sampler(sampler)
        max_new_tokens, seed, stop_tokens = self._integers(max_new_tokens, seed, stop_tokens)
        ids, lengths = self._aligned(prompts, max_new_tokens)
        steps, capacity = self._sizes(ids.shape[1], max_new_tokens)
        draws = np.pad(_draws(seed, len(ids), max_new_tokens), ((0, 0), (0, steps - max_new_tokens)))
        rest = lambda *given: self._rest(*given, steps, chosen_by, stop_tokens)  # noqa: E731
        key = ("rest", len(ids), capacity, steps, chosen_by, tuple(stop_tokens))
        given = map(ops.convert_to_tensor, (draws, np.int32(max_new_tokens)))
        chosen = ops.convert_to_numpy(self._programs.run(key, rest, *self._read(ids, lengths, capacity), *given))
        return [_before(row, stop_tokens) for row in chosen[:, :max_new_tokens].tolist()]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        sampler: str | Sampler | BeamSearch = "greedy",
        seed: int = 0,
        stop_tokens: Sequence[int] = (),
    ) -> Iterator[list[int | None]]:
        """Yields the tokens of `generate` as they come: the next token of each prompt, or None once it has ended."""
        chosen_by = _sampler(sampler)
        if isinstance(chosen_by, BeamSearch):
            raise ValueError(
                "beam search knows its best text only at the end: stream needs another sampler, got a BeamSearch"
            )
        max_new_tokens, seed, stop_tokens = self._integers(max_new_tokens, seed, stop_tokens)
        ids, lengths = self._aligned(prompts, max_new_tokens)
        return self._tokens(ids, lengths, _draws(seed, len(ids), max_new_tokens), chosen_by, set(stop_tokens))

    def _tokens(self, ids, lengths, draws, sampler, stop_tokens):
        """The tokens of `stream`. After the first one, a program chooses a few at a time: a call of it has its cost."""
        _, capacity = self._sizes(ids.shape[1], draws.shape[1])
        hold = lambda state: cast_weights(self._model, state)  # noqa: E731
        few = lambda *given: self._few(*given, sampler)  # noqa: E731
        run, sizes = self._programs.run, (len(ids), capacity)
        held, going_on = None, np.ones(len(ids), bool)
        logits, state = self._read(ids, lengths, capacity)
        tokens = run(("first", len(ids), sampler), sampler, logits, ops.convert_to_tensor(draws[:, 0]))
        found, at = ops.convert_to_numpy(tokens)[:, None], 1
        while True:
            for column in found.T.tolist():
                going_on &= [token not in stop_tokens for token in column]
                if not going_on.any():
                    return
                yield [token if goes_on else None for token, goes_on in zip(column, going_on, strict=True)]
            count = min(FEW, draws.shape[1] - at)
            if count == 0:
                return
            if held is None:  # the first token is shown by now
                held = run(("hold", *sizes), hold, state, by_layer=True)
            next_draws = np.pad(draws[:, at : at + count], ((0, 0), (0, FEW - count)))
            given = (held, tokens, state, *map(ops.convert_to_tensor, (next_draws, np.int32(count))))
            chosen, tokens, state = run(("few", *sizes, sampler), few, *given)
            found, at = ops.convert_to_numpy(chosen)[:, :count], at + count

    def _few(self, held, tokens, state, draws, count, sampler):
        choose = lambda logits, step: sampler(logits, ops.take(draws, step, axis=1))  # noqa: E731
        return decode_on(self._model, held, tokens, state, FEW, choose, count=count)

    def _rest(self, logits, state, draws, count, steps, sampler, stop_tokens):
        if isinstance(sampler, BeamSearch):
            return sampler(self._model, logits, state, steps, stop_tokens, count)
        choose = lambda logits, step: sampler(logits, ops.take(draws, step, axis=1))  # noqa: E731
        return continuation(self._model, logits, state, steps, choose, stop_tokens, count)

    def _read(self, ids, lengths, capacity):
        """The logits after each prompt, `[b, V]`, and the state."""

        def read(ids, lengths):
            state = apart(self._model.initial_state)(ids.shape[0], capacity)
            logits, state = self._model.extend(ids, state, lengths, last=True)
            return ops.squeeze(logits, 1), state

        given = map(ops.convert_to_tensor, (ids, lengths))
        return self._programs.run(("read", ids.shape, capacity), read, *given, by_layer=True)

    def _sizes(self, tokens, new):
        """How many new tokens a program has room for, one of few numbers; and the capacity of its state."""
        room = self._model.longest
        steps = min(rounded_up(new), math.inf if room is None else room - tokens)
        return steps, tokens + steps if self._model.grows else None

    def _integers(self, max_new_tokens, seed, stop_tokens):
        """The arguments as Python's integers, from Python's or NumPy's; ValueError for others."""
        for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("seed", seed, 0)):
            if not isinstance(value, numbers.Integral) or value < least:
                raise ValueError(f"generate needs an integer {name} of {least} or more, got {value}")
        if seed > MOST:
            raise ValueError(f"generate needs a seed of at most {MOST}, got {seed}")
        ends = self._ids("stop_tokens", stop_tokens).tolist() if np.size(stop_tokens) else []
        return int(max_new_tokens), int(seed), ends

    def _aligned(self, prompts, max_new_tokens):
        """Ids padded on the right, int32 `[b, n]`, and lengths, int32 `[b]`; ValueError for bad arguments."""
        self._programs.drop_stale()
        if not len(prompts):  # it may be an array
            raise ValueError("generate needs prompts of 1 or more, got 0")
        rows = [self._ids(f"prompt {number}", prompt) for number, prompt in enumerate(prompts)]
        lengths, room = [len(row) for row in rows], self._model.longest
        longest = max(lengths)
        if room is not None and longest + max_new_tokens > room:
            raise ValueError(
                f"{self._model.name} reads at most {room} tokens,"
                f" got a prompt of {longest} and max_new_tokens={max_new_tokens}"
            )
        width = min(rounded_up(longest), math.inf if room is None else room - max_new_tokens)
        return np.array([np.pad(row, (0, width - len(row))) for row in rows], np.int32), np.array(lengths, np.int32)

    def _ids(self, name, given):
        ids, size = np.asarray(given), self._model.vocabulary_size
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{name} must be one token id or more, got {given!r}")
        outside = ids[(ids < 0) | (ids >= size)]
        if outside.size:
            raise ValueError(f"{self._model.name} has token ids 0 to {size - 1}, {name} has {outside[0]}")
        return ids


class Programs:
    """The compiled programs of a model, which call it with the variables that it has.

    Args:
      model: A model. It is built now: variables that a program of JAX makes are none of the model.
    """

    def __init__(self, model: keras.Model):
        if not model.built:
            model.build()
        self._model, self._variables, self._programs = model, [], {}

    def drop_stale(self) -> None:
        """Drops them all if the model has other variables by now, as after `quantize` and `enable_lora`."""
        variables = self._model.variables
        if list(map(id, variables)) != list(map(id, self._variables)):
            self._variables, self._programs = variables, {}

    def run(self, key: Hashable, function: Callable, *arguments, by_layer: bool = False) -> Any:
        """Runs `function` of nested tensors as a program, compiled at the first use of `key`; see `compiled`."""
        if key not in self._programs:
            self._programs[key] = compiled(self._model, function, *arguments, by_layer=by_layer)
        return self._programs[key](*arguments)


def rounded_up(tokens: int) -> int:
    """One of few lengths: a multiple of `FINEST` or, for long texts, of 1/8 to 1/4 of their length."""
    step = max(FINEST, 2 ** tokens.bit_length() // 8)
    return -(-tokens // step) * step


def compiled(model: keras.Model, function: Callable, *arguments, by_layer: bool = False) -> Callable:
    """`function`, which calls `model`, as one program for such arguments: by XLA on a GPU and with JAX.

    Args:
      model: The model.
      function: Of nested tensors.
      *arguments: An example.
      by_layer: For a program that is called once: on a GPU XLA compiles the model's layers one by one, those that are
        alike once.
    """
    if keras.backend.backend() == "jax":
        return _on_jax(model, function)
    import tensorflow as tf

    xla = takes_xla()
    by_layer = xla and by_layer
    with forward_only(by_layer):
        program = tf.function(function, autograph=False, jit_compile=xla and not by_layer)
        return program.get_concrete_function(*arguments)


def takes_xla() -> bool:
    """Whether XLA compiles the programs of TensorFlow: on a GPU."""
    import tensorflow as tf

    return bool(tf.config.list_logical_devices("GPU"))


def _on_jax(model, function):
    """The weights are arguments of the program, which holds no copies that later training would leave behind."""
    import jax

    @jax.jit
    def program(weights, *arguments):
        with keras.StatelessScope(state_mapping=list(zip(model.variables, weights, strict=True))):
            return function(*arguments)

    return lambda *arguments: program([v.value for v in model.variables], *arguments)


def _sampler(sampler):
    if isinstance(sampler, Sampler | BeamSearch):
        return sampler
    if not isinstance(sampler, str) or sampler not in SAMPLERS:
        raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, a Sampler or a BeamSearch, got {sampler!r}")
    return SAMPLERS[sampler]


def _draws(seed, rows, steps):
    """Uniform numbers `[rows, steps]` in [0, 1). A row's numbers depend only on the seed and the row's index."""
    generators = [np.random.Generator(np.random.Philox(key=[seed, row])) for row in range(rows)]
    return np.stack([generator.random(steps, np.float32) for generator in generators])


def _before(tokens, stop_tokens):
    """Tokens up to the first stop token."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in stop_tokens), len(tokens))]
