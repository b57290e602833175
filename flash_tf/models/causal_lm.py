"""Next-token language model over any causal mixer."""

import functools
import itertools
from collections.abc import Iterator, Sequence

import keras
from keras import ops

from flash_tf.generation import Generator
from flash_tf.generation.beam import BeamSearch
from flash_tf.generation.samplers import Sampler
from flash_tf.layers.states import Layout, counts
from flash_tf.layers.streaming import joined, next_positions, normalized, split
from flash_tf.layers.traced_once import TracedOnce, apart
from flash_tf.models.language_model import MODELS, LanguageModel, unpack
from kernels_xla.common.spec import State, Tensor

UNSETTLED = " \t\r\n\ufffd"  # at the end of a text, the next token may change these


@MODELS.register("causal_lm")
@keras.saving.register_keras_serializable("flash_tf")
class CausalLM(LanguageModel):
    """Token ids `[b, n]` -> logits `[b, n, V]` of each next token.

    Constructor: see `LanguageModel`.

    Call arguments:
      token_ids: Integers `[b, n]`, or a dictionary of all call arguments, as `fit` passes it.
      padding_mask: Bool `[b, n]`, True at real tokens; by default Keras' own mask of the ids, if there is one.
      segment_ids: Integers `[b, n]`, 0 at padding, one number a packed document.
      positions: Integers `[b, n]` or `[1, n]`.
      prefix_mask: Bool `[b, n]`, True at the tokens of a prefix. All tokens of their text see them, even earlier ones.
        Only for mixers that support it; see `GatedAttentionUnit`.

    Returns:
      Logits `[b, n, V]` in the compute dtype.

    Example:
      >>> import numpy as np
      >>> model = CausalLM(100, width=16, depth=2, mixer={"type": "flash", "chunk_size": 4, "key_dim": 8})
      >>> model(np.zeros((2, 10), "int32")).shape
      TensorShape([2, 10, 100])
    """

    causal = True

    def call(
        self,
        token_ids: Tensor,
        padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        prefix_mask: Tensor | None = None,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        masks = {"padding_mask": padding_mask, "segment_ids": segment_ids, "positions": positions}
        masks["prefix_mask"] = prefix_mask
        return self.head(self.encode(**unpack(token_ids, masks, mask), training=training))

    def initial_state(self, batch: int, capacity: int | None = None) -> dict:
        """State of `batch` rows before their first token.

        Args:
          batch: Rows.
          capacity: The most tokens of a row; None if the mixer's state has a constant size, as in FLASH.

        Returns:
          A flat dictionary of tensors. The batch is the first axis of each. `block_0/<name>` and so on belong to the
          mixers of the blocks. `position [b]`, int32, counts the tokens so far and is shared by all blocks.

        Raises:
          ValueError: The mixer cannot stream; `capacity` is missing or superfluous; or it is above `longest`.
        """
        if self.longest is not None and capacity is not None and capacity > self.longest:
            raise ValueError(f"{self.name} reads at most {self.longest} tokens a row, got capacity {capacity}")
        if not self.built:
            self.build()
        kept = [capacity if mixer.grows or not self.grows else None for mixer in self.mixers]
        states = [mixer.initial_state(batch, most) for mixer, most in zip(self.mixers, kept, strict=True)]
        return joined("block", states)

    def precompute(self, state: dict) -> list[dict]:
        """Values for single steps from `state` that depend on weights only. A loop computes them once."""
        return [mixer.precompute(own) for mixer, own in zip(self.mixers, self._split(state), strict=True)]

    def flush(self, state: dict) -> dict:
        """Finishes a step of one token with `precomputed`, for all blocks together. Call it before the next token."""
        states, kinds = self._split(state), self.kinds
        for kind in (kind for i, kind in enumerate(kinds) if kind not in kinds[:i]):
            alike = [i for i, other in enumerate(kinds) if other == kind]
            closed = self.mixers[alike[0]].flush([states[i] for i in alike])
            for i, one in zip(alike, closed, strict=True):
                states[i] = one
        return joined("block", states)

    def extend(
        self,
        token_ids: Tensor,
        state: dict,
        valid: Tensor | None = None,
        precomputed: list[dict] | None = None,
        last: bool = False,
    ) -> tuple[Tensor, State]:
        """Reads the next k >= 1 tokens of each row: a whole prompt (prefill) or a single token (decoding step).

        Args:
          token_ids: Integers `[b, k]`. A row has at most `longest` tokens in all.
          state: From `initial_state` or `extend`.
          valid: Int32 `[b]`, the number of real tokens at the front of each row of `token_ids`; the others do not
            change the state. None if all are real.
          precomputed: From `precompute`, for a loop with k = 1 that calls `flush` before the next token.
          last: Whether to return only the logits after the last real token of each row.

        Returns:
          Logits `[b, k, V]`, or `[b, 1, V]` if `last`, in the compute dtype; and the state, with the same keys.

        Raises:
          ValueError: The state belongs to another batch size or model. Outside a compiled function, also if the state
            has no room for the tokens, or `valid` is more than k.

        Example:
          >>> import numpy as np
          >>> model = CausalLM(100, width=16, depth=2, mixer={"type": "flash", "chunk_size": 4, "key_dim": 8})
          >>> logits, state = model.extend(np.zeros((2, 10), "int32"), model.initial_state(2))
          >>> logits, state = model.extend(np.zeros((2, 1), "int32"), state)
          >>> logits.shape
          TensorShape([2, 1, 100])
        """
        token_ids = ops.convert_to_tensor(token_ids)
        rows = token_ids.shape[0]
        if "position" not in state or state["position"].shape != (rows,):
            given = state["position"].shape[0] if "position" in state else "no state of initial_state"
            raise ValueError(f"{self.name} needs a state of as many rows as there are token_ids, {rows}, got {given}")
        valid = counts(self.name, valid, rows, token_ids.shape[1])
        self._layout.check(self.name, state, token_ids.shape[1], valid, self.longest)
        states = self._split(state)
        if token_ids.shape[1] == 1 and precomputed is None:
            logits, state = self.extend(token_ids, state, valid, self.precompute(state))
            return logits, self.flush(state)
        precomputed = [None] * self.depth if precomputed is None else precomputed
        stride = len(self.blocks) // self.depth
        positions, x = apart(self._embedded)(token_ids, state["position"])
        passes = [self.blocks[stride * i : stride * (i + 1)] for i in range(self.depth)]
        for alike in _alike(self.kinds):
            extend = TracedOnce(_extended, [passes[i] for i in alike])
            for i in alike:
                x, states[i] = extend(passes[i], x, states[i], positions, valid, precomputed[i])
        logits = apart(self._logits)(x, valid, last and token_ids.shape[1] != 1)
        return logits, joined("block", states)

    def _embedded(self, token_ids, position):
        """The positions of the tokens, and their embeddings."""
        positions = next_positions(position, ops.shape(token_ids)[1])
        return positions, self.embed(token_ids, positions)

    def _logits(self, x, valid, last):
        """The logits for what the blocks give, `[b, k, d]`: of all tokens, or of the last real one."""
        if last and valid is None:
            x = x[:, -1][:, None]
        elif last:
            x = ops.take_along_axis(x, (ops.maximum(valid, 1) - 1)[:, None, None], axis=1)
        return self.head(normalized(self.final_norm, self.project(x)))

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        sampler: str | Sampler | BeamSearch = "greedy",
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
    ) -> str | list[str] | list[list[int]]:
        """Continues prompts of any lengths in one compiled loop. Prompts of similar lengths share a program.

        Args:
          prompts: One text, a list of texts (if the model has a `tokenizer`), or a list of token id lists.
          max_new_tokens: The most tokens of a continuation.
          sampler: "greedy", "sample", "beam", a `flash_tf.samplers.Sampler` or a `flash_tf.samplers.BeamSearch`.
          seed: Seed of the draws. A row's draws do not depend on the other rows.
          stop_tokens: Ids that end a continuation. For texts, the default is the end of a document.

        Returns:
          For token ids: the new ids of each prompt, without the stop token. For texts: each text with its continuation.

        Raises:
          ValueError: A prompt is empty or has an id outside the vocabulary; there are more tokens than `longest`; the
            mixer cannot stream; or another argument is bad.

        Example:
          >>> model = CausalLM(100, width=16, depth=2, mixer={"type": "flash", "chunk_size": 4, "key_dim": 8})
          >>> [len(row) for row in model.generate([[5, 17, 3], [8]], max_new_tokens=6)]
          [6, 6]
        """
        if isinstance(prompts, str):
            return self.generate([prompts], max_new_tokens, sampler, seed, stop_tokens)[0]
        ids, stop_tokens, texts = self._as_ids(prompts, stop_tokens)
        found = self.generator.generate(ids, max_new_tokens, sampler, seed, stop_tokens)
        return [self.tokenizer.decode([*a, *b]) for a, b in zip(ids, found, strict=True)] if texts else found

    def stream(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        sampler: str | Sampler | BeamSearch = "greedy",
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
    ) -> Iterator[str] | Iterator[list[str | None]] | Iterator[list[int | None]]:
        """Continues prompts as `generate` does, and yields new text or tokens as they come.

        Args:
          prompts: As for `generate`.
          max_new_tokens: The most tokens of a continuation.
          sampler: As for `generate`, except beam search, which knows its best text only at the end.
          seed: The seed of what is drawn.
          stop_tokens: As for `generate`.

        Returns:
          An iterator. For one text it yields the pieces of its continuation, which join to what `generate` adds. For a
          list of prompts it yields lists: the next piece of each text, or the next id of each row of ids, and None for
          one that has ended.

        Raises:
          ValueError: As for `generate`.
        """
        if isinstance(prompts, str):
            return (piece for (piece,) in self.stream([prompts], max_new_tokens, sampler, seed, stop_tokens))
        ids, stop_tokens, texts = self._as_ids(prompts, stop_tokens)
        found = self.generator.stream(ids, max_new_tokens, sampler, seed, stop_tokens)
        return self._pieces(ids, found) if texts else found

    def _pieces(self, ids, found):
        """Lists of tokens as lists of the pieces of text that they add."""
        rows = [list(row) for row in ids]
        shown = [len(self.tokenizer.decode(row)) for row in rows]
        for tokens in itertools.chain(found, [[None] * len(rows)]):
            pieces = []
            for i, token in enumerate(tokens):
                rows[i] += [] if token is None else [token]
                text = self.tokenizer.decode(rows[i])
                settled = text if token is None else text.rstrip(UNSETTLED)
                pieces.append(settled[shown[i] :] or (None if token is None else ""))
                shown[i] = max(shown[i], len(settled))
            if any(piece is not None for piece in pieces):
                yield pieces

    @functools.cached_property
    def generator(self) -> Generator:
        """What has been compiled for `generate` and `stream`."""
        return Generator(self)

    def _as_ids(self, prompts, stop_tokens):
        texts = any(isinstance(prompt, str) for prompt in prompts)
        if texts and not isinstance(prompts, str) and not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("prompts must be all texts or all rows of ids, got both")
        ends = stop_tokens if stop_tokens is not None else (self.tokenizer.eos_id,) if texts and self.tokenizer else ()
        return self.tokenize(prompts) if texts else prompts, ends, texts

    @functools.cached_property
    def _layout(self):
        make = lambda n: [mixer.initial_state(1, n if mixer.grows else None) for mixer in self.mixers]  # noqa: E731
        return Layout(lambda n: joined("block", make(n)))

    def _split(self, state):
        return split("block", state, self.depth)

    def decode_state_bytes(self, n: int, itemsize: int = 2) -> int | None:
        """Bytes of the state of one row of up to n tokens, or None where the mixer cannot stream."""
        layers = [mixer.state_bytes(n, itemsize) for mixer in self.mixers]
        return None if None in layers else sum(layers) - 4 * (self.depth - 1)  # one position serves all blocks


def _alike(kinds):
    """The indices of each run of equal kinds."""
    return [[i for i, _ in run] for _, run in itertools.groupby(enumerate(kinds), key=lambda pair: pair[1])]


def _extended(blocks, x, state, positions, valid, precomputed):
    """The next tokens through a mixer and what follows it."""
    mixer, *others = blocks
    x, state = mixer.extend(x, state, positions, valid, precomputed)
    for block in others:
        x, _ = block.extend(x, {})
    return x, state
