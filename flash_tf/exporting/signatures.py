"""The signatures of exported language models, as functions of tensors: for every model, masked ones and causal ones."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from flash_tf.data.tokenizer import Tokenizer
from flash_tf.exporting.readers import IdReader, TextBatch, TextReader, checked
from flash_tf.generation.decoding import continuation


class Limits(NamedTuple):
    """Sizes that are fixed when a model is exported.

    Attributes:
      longest: The most tokens of a text; for a cache that grows, its capacity.
      new_tokens: The most tokens that `generate` adds.
      top_k: Candidates of `fill_mask` for each mask.
    """

    longest: int
    new_tokens: int
    top_k: int


def signature(name: str, function: Callable, specs: list[tf.TensorSpec]) -> tf.types.experimental.ConcreteFunction:
    """A signature that refuses arguments of other shapes. Errors name it, what it needs and what came."""

    def call(*given):
        return function(*(_shaped(name, x, spec) for x, spec in zip(given, specs, strict=True)))

    traced = tf.function(call, autograph=False).get_concrete_function(*specs)
    traced.__name__ = name  # TensorFlow's own errors, about a dtype, say it
    return traced


def _shaped(name, x, spec):
    rank = len(spec.shape)
    # TensorFlow takes it for granted that shapes are the signature's. What these operations give may have any; the
    # optimizer sees through the first if it is given a scalar.
    if rank:
        x = tf.compat.v1.placeholder_with_default(x, shape=None)
    else:
        x = tf.io.parse_tensor(tf.io.serialize_tensor(x), spec.dtype)
    got = tf.shape(x)
    sizes = tf.constant([-1 if n is None else n for n in spec.shape], tf.int32)
    fits = (tf.concat([got, tf.zeros(rank, tf.int32)], 0)[:rank] == sizes) | (sizes < 0)
    need = f"{name} needs {spec.name} {spelled(spec)}, got the shape"
    x = checked(x, ((tf.size(got) == rank) & tf.reduce_all(fits), need, got))
    if not rank:
        return tf.reduce_max(x)  # a scalar, whatever came
    x.set_shape(spec.shape)  # and no `ensure_shape`, which may fail first
    return x


def spelled(spec: tf.TensorSpec) -> str:
    """A dtype and shape for people."""
    return f"{spec.dtype.name} [{', '.join('?' if n is None else str(n) for n in spec.shape)}]"


class Served(tf.Module):
    """A model with its signatures. A subclass adds to `endpoints`, and has a method for each.

    Args:
      model: The model.
      tokenizer: Its tokenizer.
      reader: Reads requests: `TextReader`, or `IdReader` for an export without the tokenizer.
      limits: Limits of requests.
      jit_compile: Whether XLA compiles the loop of `generate` and the work of `decode_step`, for each batch size.
    """

    def __init__(self, model: keras.Model, tokenizer: Tokenizer, reader: IdReader, limits: Limits, jit_compile: bool):
        super().__init__(name="served")
        self.model_weights = {weight.path.replace("/", "."): weight.value for weight in model.weights}
        self._model, self._tokenizer, self._reader, self.limits = model, tokenizer, reader, limits
        self._ids, self._jit_compile = IdReader(tokenizer, limits.longest), jit_compile

    def endpoints(self) -> dict[str, tuple[Callable, list[tf.TensorSpec]]]:
        """Each signature's function and arguments, the most useful signature first."""
        given = [self._reader.spec]
        return {"embed": (self.embed, given), "score": (self.score, given), "logits": (self.logits, [IdReader.spec])}

    @property
    def writes(self) -> bool:
        """Whether answers contain text."""
        return isinstance(self._reader, TextReader)

    def embed(self, given):
        """Text or ids -> `embedding [b, d]`: the mean of the last layer over a text's tokens."""
        batch = self._reader.read(given)
        x = tf.cast(self._encode(batch.ids, batch.real), tf.float32)
        x = tf.where(batch.real[..., None], x, 0.0)
        return {"embedding": tf.reduce_sum(x, axis=1) / tf.cast(batch.lengths, tf.float32)[:, None]}

    def score(self, given):
        """Text or ids -> `log_likelihood [b]`, its `tokens [b]`, and `token_log_likelihoods [b, n]`, 0 at padding."""
        batch = self._reader.read(given)
        each = tf.where(batch.real, self._log_likelihoods(batch), 0.0)
        return {
            "log_likelihood": tf.reduce_sum(each, axis=1),
            "tokens": batch.lengths,
            "token_log_likelihoods": each,
        }

    def logits(self, ids):
        """Ids `[b, n]` -> `logits [b, n, V]`, meaningless at padding."""
        batch = self._ids.read(ids)
        logits = self._head(self._encode(batch.ids, batch.real))
        return {"logits": tf.pad(logits, [[0, 0], [0, tf.shape(ids)[1] - tf.shape(batch.ids)[1]], [0, 0]])}

    def plain_logits(self, ids):
        """Ids `[b, n]` without padding -> logits `[b, n, V]`, without checks."""
        return self._head(self._model.encode(ids, training=False))

    def _log_likelihoods(self, batch: TextBatch) -> tf.Tensor:
        """The log-likelihood of each token, float32 `[b, n]`."""
        raise NotImplementedError

    def _encode(self, ids, real, **options):
        return self._model.encode(ids, padding_mask=real, training=False, **options)

    def _head(self, x):
        return tf.cast(self._model.head(x), tf.float32)


class ServedMaskedLM(Served):
    """Fills masks, and scores texts by their pseudo-log-likelihood; see `Served`."""

    def endpoints(self):
        return {"fill_mask": (self.fill_mask, [self._reader.spec]), **super().endpoints()}

    def fill_mask(self, given):
        """Text or ids with masks -> the likeliest tokens at each mask, as in `flash_tf.filling.fill_mask`.

        Returns:
          `masks [b]`, the number of masks in each text; `ids` and `probabilities [b, m, k]`, likeliest first. For texts
          also `tokens` and `texts [b, m, k]`, the text with this mask filled. A text with fewer masks than m has zeros
          at the end.
        """
        batch = self._reader.read(given, masks=True) if self.writes else self._reader.read(given)
        mask = self._tokenizer.mask_id
        at = tf.cast(tf.RaggedTensor.from_value_rowids(*self._places(batch.ids, mask)), tf.int32)
        masks = tf.cast(at.row_lengths(), tf.int32)
        what = "each text needs a <mask>" if self.writes else f"each text needs a mask, id {mask}"
        ids = checked(batch.ids, (tf.reduce_all(masks > 0), f"{what}, got texts with", masks))
        at = at.to_tensor()
        logits = self._head(self._encode(ids, batch.real, masked_positions=at))
        special = tf.reduce_any([tf.range(tf.shape(logits)[-1]) == i for i in self._tokenizer.special_ids], axis=0)
        logits = tf.where(special, float("-inf"), logits)
        probabilities, found = tf.math.top_k(tf.nn.softmax(logits), self.limits.top_k)
        there = tf.sequence_mask(masks, tf.shape(at)[1])[..., None]
        answer = {
            "masks": masks,
            "ids": tf.where(there, found, 0),
            "probabilities": tf.where(there, probabilities, 0.0),
        }
        if self.writes:
            filled = tf.range(tf.shape(ids)[1]) == at[..., None, None]  # [b, m, 1, n]
            texts = self._reader.write(tf.where(filled, found[..., None], ids[:, None, None]))
            answer |= {"tokens": tf.where(there, self._reader.pieces(found), ""), "texts": tf.where(there, texts, "")}
        return answer

    def _places(self, ids, mask):
        """For all masks their columns and the numbers of their texts, and the number of texts."""
        found = tf.where(ids == mask)
        return found[:, 1], found[:, 0], tf.shape(ids, tf.int64)[0]

    def _log_likelihoods(self, batch):
        """Each token's log-likelihood if it alone is masked. This takes a forward pass for each column."""

        def of_column(at):
            ids = tf.where(tf.range(tf.shape(batch.ids)[1]) == at, self._tokenizer.mask_id, batch.ids)
            x = self._encode(ids, batch.real, masked_positions=tf.fill([tf.shape(ids)[0], 1], at))
            return _log_likelihood_of(self._head(x)[:, 0], batch.ids[:, at])

        columns = tf.range(tf.shape(batch.ids)[1])
        each = tf.map_fn(of_column, columns, fn_output_signature=tf.float32, parallel_iterations=1)
        return tf.transpose(each)


class ServedCausalLM(Served):
    """Continues texts, and scores them as documents; see `Served`.

    A state is a flat dictionary of tensors, with the names of `CausalLM.initial_state` and `_` for `/`.
    """

    def endpoints(self):
        if not self.decodes:
            return super().endpoints()
        given, batch_size = [self._reader.spec], [tf.TensorSpec([], tf.int32, "batch_size")]
        step = [tf.TensorSpec([None], tf.int32, "token"), *self.state_specs()]
        return {
            "generate": (self.generate, given),
            **super().endpoints(),
            "initial_state": (self.initial_state, batch_size),
            "prefill": (self.prefill, [IdReader.spec]),
            "decode_step": (self.decode_step, step),
        }

    @property
    def decodes(self) -> bool:
        """Whether the model can continue from a state. Some models need the length of the whole text first."""
        return self._model.obstacle is None

    @property
    def bounded(self) -> bool:
        """Whether a text has at most `Limits.longest` tokens, also when it is read step by step."""
        return self._model.grows or self._model.longest is not None

    @property
    def _capacity(self):
        return self.limits.longest if self._model.grows else None

    def state_specs(self, batch: int | None = None) -> list[tf.TensorSpec]:
        """The entries of a state for `batch` texts, in order."""
        state = self._model.initial_state(1, self._capacity)
        return [tf.TensorSpec([batch, *x.shape[1:]], x.dtype, _flat(name)) for name, x in state.items()]

    def initial_state(self, batch_size):
        """Batch size -> the state before the first token."""
        need = batch_size > 0, "a state needs a batch size of 1 or more, got", batch_size
        return self.named(self._model.initial_state(checked(batch_size, need), self._capacity))

    def prefill(self, ids):
        """Ids `[b, n]` -> `logits [b, V]` after the last token of each text, and the state after it."""
        logits, state = self._read(self._ids.read(ids))
        return {"logits": logits, **self.named(state)}

    def decode_step(self, token, *state):
        """The next token of each text `[b]` and the state -> `logits [b, V]` after this token, and the next state."""
        position, batch_size = state[-1], tf.shape(token)[0]
        needs = [self._ids.known(token)]
        for x, spec in zip(state, self.state_specs(), strict=True):
            shape = [batch_size, *spec.shape[1:]]
            same = tf.reduce_all(tf.shape(x) == shape)
            needs.append((same, f"{spec.name} needs the first shape, got the second", shape, tf.shape(x)))
        needs.append((tf.reduce_all(position >= 0), "position must not be negative, got", position))
        if self.bounded:
            room = tf.reduce_all(position < self.limits.longest)
            needs.append((room, f"the state has room for {self.limits.longest} tokens, got texts with", position))
        # Reading a cache begins with the positions, so they wait for the checks too.
        token, position = (checked(x, *needs) for x in (token, position))
        logits, after, wrong = self._compiled(self._checked_step)(token, *state[:-1], position)
        names = [spec.name for spec in self.state_specs() if spec.dtype.is_floating]
        finite = [
            (count == 0, f"{name} must be finite, got numbers that are not:", count)
            for name, count in zip(names, tf.unstack(wrong, len(names)), strict=True)
        ]
        return {"logits": checked(logits, *finite), **self.named(after)}

    def _checked_step(self, token, *state):
        """`step`, and for each entry of the state that has floats the number of those that are not finite, int32."""
        floats = [x for x in state if x.dtype.is_floating]
        wrong = [tf.size(x) - tf.math.count_nonzero(tf.math.is_finite(x), dtype=tf.int32) for x in floats]
        return *self.step(token, *state), tf.stack(wrong)

    def step(self, token, *state):
        """`decode_step` without checks: logits `[b, V]`, and the state under the model's names."""
        names = self._model.initial_state(1, self._capacity)
        logits, state = self._model.extend(token[:, None], dict(zip(names, state, strict=True)))
        return tf.cast(logits[:, 0], tf.float32), state

    def generate(self, given):
        """Text or ids -> the greedy continuation, up to the end of the document.

        Returns:
          `ids [b, k]`, the continuation, with padding after its end. For texts also `continuation [b]` and `text [b]`,
          the prompt with the continuation.
        """
        batch, steps, stop = self._reader.read(given), self.limits.new_tokens, self._tokenizer.eos_id
        if self.bounded:
            longest = tf.reduce_max(batch.lengths)
            room = longest + steps <= self.limits.longest, self._no_room, longest
            batch = batch._replace(ids=checked(batch.ids, room), lengths=checked(batch.lengths, room))
        logits, state = self._read(batch)
        chosen = self._compiled(self._continuation)(logits, state)
        ended = tf.cumsum(tf.cast(chosen == stop, tf.int32), axis=1) > 0
        chosen = tf.where(ended, self._tokenizer.pad_id, chosen)
        if not self.writes:
            return {"ids": chosen}
        whole = self._reader.write(tf.concat([batch.ids, chosen], axis=1))
        return {"text": whole, "continuation": self._reader.write(chosen), "ids": chosen}

    def _continuation(self, logits, state):
        """The likeliest tokens after logits `[b, V]` and a state, `[b, k]`, undefined after the end of a document."""
        likeliest = lambda logits, _: tf.argmax(logits, -1)  # noqa: E731
        steps, stop = self.limits.new_tokens, self._tokenizer.eos_id
        return continuation(self._model, logits, state, steps, likeliest, (stop,))

    def _compiled(self, function):
        """The function, which XLA compiles if the export says so. It compiles no check, so those stay outside."""
        return tf.function(function, autograph=False, jit_compile=True) if self._jit_compile else function

    @property
    def _no_room(self):
        steps, longest = self.limits.new_tokens, self.limits.longest
        return f"a prompt and its {steps} new tokens must fit {longest} tokens, got a prompt of"

    def _read(self, batch):
        """Prompts of any lengths -> logits `[b, V]` after each prompt, and the state."""
        state = self._model.initial_state(tf.shape(batch.ids)[0], self._capacity)
        logits, state = self._model.extend(batch.ids, state, batch.lengths, last=True)
        return tf.cast(logits[:, 0], tf.float32), state

    def named(self, state: dict) -> dict:
        """A state with the names of the signatures."""
        return {_flat(name): x for name, x in state.items()}

    def _log_likelihoods(self, batch):
        """Each token's log-likelihood after the tokens before it. The first token follows an end-of-document token."""
        opening = tf.fill([tf.shape(batch.ids)[0], 1], self._tokenizer.eos_id)
        before = tf.concat([opening, batch.ids[:, :-1]], axis=1)
        return _log_likelihood_of(self._head(self._encode(before, batch.real)), batch.ids)


def _log_likelihood_of(logits: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """The log-likelihoods of ids `[...]` under logits `[..., V]`."""
    return -tf.nn.sparse_softmax_cross_entropy_with_logits(ids, logits)


def _flat(name):
    return name.replace("/", "_")
