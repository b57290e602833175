"""What an exported causal language model answers, and the single steps for servers that hold the loop themselves."""

import tensorflow as tf

from flash_tf.exporting.readers import IdReader, checked
from flash_tf.exporting.served import Served, log_likelihoods
from flash_tf.generation.decoding import continuation


class ServedCausalLM(Served):
    """Continues texts, and scores them by the likelihood of each token after a document's end; see `Served`.

    A state is a flat dictionary of tensors, named as those of `CausalLM.initial_state` with `_` for `/`.
    """

    def endpoints(self):
        if not self.decodes:
            return super().endpoints()
        given, rows = [self._reader.spec], [tf.TensorSpec([], tf.int32, "batch_size")]
        step = [tf.TensorSpec([None], tf.int32, "token"), *self.state_specs()]
        return {
            "generate": (self.generate, given),
            **super().endpoints(),
            "initial_state": (self.initial_state, rows),
            "prefill": (self.prefill, [IdReader.spec]),
            "decode_step": (self.decode_step, step),
        }

    @property
    def decodes(self) -> bool:
        """Whether it can go on from a state: not where a divisor is the length of the whole text."""
        return self._model.obstacle is None

    @property
    def bounded(self) -> bool:
        """Whether a row may have no more than the longest number of tokens, however it is read."""
        return self._model.grows or self._model.max_length is not None

    @property
    def _capacity(self):
        return self._limits.longest if self._model.grows else None

    def state_specs(self, batch: int | None = None) -> list[tf.TensorSpec]:
        """The entries of a state of so many rows, in their order."""
        state = self._model.initial_state(1, self._capacity)
        return [tf.TensorSpec([batch, *x.shape[1:]], x.dtype, _flat(name)) for name, x in state.items()]

    def initial_state(self, batch_size):
        """How many rows -> the state before their first token."""
        need = batch_size > 0, "a state needs one row or more, got", batch_size
        return self.named(self._model.initial_state(checked(batch_size, need), self._capacity))

    def prefill(self, ids):
        """Ids `[b, n]` -> `logits [b, V]` after the last token of each row, and the state that has seen the row."""
        logits, state = self._read(self._ids.read(ids))
        return {"logits": logits, **self.named(state)}

    def decode_step(self, token, *state):
        """The next token of each row, `[b]`, and the state -> `logits [b, V]` of the one after it, and the state."""
        position, rows = state[-1], tf.shape(token)[0]
        needs = [self._ids.known(token)]
        for x, spec in zip(state, self.state_specs(), strict=True):
            shape = [rows, *spec.shape[1:]]
            same = tf.reduce_all(tf.shape(x) == shape)
            needs.append((same, f"{spec.name} needs this shape, and got that", shape, tf.shape(x)))
        if self.bounded:
            room = tf.reduce_all(position < self._limits.longest)
            needs.append((room, f"the state has room for {self._limits.longest} tokens, got rows with", position))
        # What reads a cache begins at the positions, which therefore wait for the checks too.
        token, position = (checked(x, *needs) for x in (token, position))
        logits, state = self.step(token, *state[:-1], position)
        return {"logits": logits, **self.named(state)}

    def step(self, token, *state):
        """`decode_step` without the checks: logits `[b, V]`, and the state under the model's names."""
        names = self._model.initial_state(1, self._capacity)
        logits, state = self._model.extend(token[:, None], dict(zip(names, state, strict=True)))
        return tf.cast(logits[:, 0], tf.float32), state

    def generate(self, given):
        """Text or ids -> the likeliest continuation, up to the end of the document.

        Returns:
          `ids [b, k]`, those of the continuation, padding after its end; and, for texts, `continuation [b]` and
          `text [b]`, the prompt with it.
        """
        rows, steps, stop = self._reader.read(given), self._limits.new_tokens, self._tokenizer.eos_id
        if self.bounded:
            longest = tf.reduce_max(rows.lengths)
            room = longest + steps <= self._limits.longest, self._no_room, longest
            rows = rows._replace(ids=checked(rows.ids, room), lengths=checked(rows.lengths, room))
        logits, state = self._read(rows)
        chosen = continuation(self._model, logits, state, steps, lambda logits, _: tf.argmax(logits, -1), (stop,))
        ended = tf.cumsum(tf.cast(chosen == stop, tf.int32), axis=1) > 0
        chosen = tf.where(ended, self._tokenizer.pad_id, chosen)
        if not self.writes:
            return {"ids": chosen}
        whole = self._reader.write(tf.concat([rows.ids, chosen], axis=1))
        return {"text": whole, "continuation": self._reader.write(chosen), "ids": chosen}

    @property
    def _no_room(self):
        steps, longest = self._limits.new_tokens, self._limits.longest
        return f"a prompt and its {steps} new tokens must fit {longest} tokens, got a prompt of"

    def _read(self, rows):
        """Prompts of any lengths -> logits `[b, V]` after each, and the state."""
        state = self._model.initial_state(tf.shape(rows.ids)[0], self._capacity)
        logits, state = self._model.extend(rows.ids, state, rows.lengths, last=True)
        return tf.cast(logits[:, 0], tf.float32), state

    def named(self, state: dict) -> dict:
        """A state under the names of the signatures."""
        return {_flat(name): x for name, x in state.items()}

    def _log_likelihoods(self, rows):
        """Each token's after those before it, the first one's after the end of another document."""
        opening = tf.fill([tf.shape(rows.ids)[0], 1], self._tokenizer.eos_id)
        before = tf.concat([opening, rows.ids[:, :-1]], axis=1)
        return log_likelihoods(self._head(self._encode(before, rows.real)), rows.ids)


def _flat(name):
    return name.replace("/", "_")
