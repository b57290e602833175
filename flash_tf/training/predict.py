"""What the model of a task says of new examples."""

from collections.abc import Callable, Iterable, Iterator

import keras
import numpy as np
import tensorflow as tf

from flash_tf.data.rows import Placed, Row, batches, padded
from flash_tf.training.restore import Trained
from flash_tf.training.tasks import TASKS, Answering, Outputs, TaskObjective, objective_of

PREDICTED_AT_ONCE = 2**14  # tokens of a batch


def predict(trained: Trained, examples: Iterable[Placed], new_tokens: int | None = None) -> Iterator[dict]:
    """The predictions of a trained model, one for each example, in order; see `TaskObjective.predictions`.

    Args:
      trained: The model of a run.
      examples: Examples with the keys of the run's config. They need no label.
      new_tokens: The most tokens of an answer to a prompt; None for 64, or for half a row where that is less.

    Raises:
      ValueError: The run is of a language model, or an example lacks a key.
    """
    config = trained.config
    found = objective_of(config)
    if found is Answering:
        yield from _answers(trained, examples, new_tokens)
        return
    if config.model["type"] not in TASKS:
        raise ValueError(f"predict needs the run of a task, as a classifier's, got a {config.model['type']}")
    objective = found(config, trained.tokenizer)
    call = _rows_at_once(trained.model, objective, max(1, PREDICTED_AT_ONCE // config.data.sequence_length))
    for batch in batches(examples):
        rows = list(objective.encoder.rows(batch, labelled=False))
        yield from objective.predictions(batch, rows, call(rows))


def _answers(trained, examples, new_tokens):
    """The greedy answers to prompts. A long prompt loses its beginning, as in training."""
    tokenizer, length = trained.tokenizer, trained.config.data.sequence_length
    new_tokens = min(64, length // 2) if new_tokens is None else new_tokens
    if not 1 <= new_tokens < length:
        raise ValueError(
            f"answers need --max-new-tokens from 1 to {length - 1}, below a row's length, got {new_tokens}"
        )
    encoder, size = Answering.encoder_of(trained.config, tokenizer), max(1, PREDICTED_AT_ONCE // length)
    for batch in batches(examples):
        for start in range(0, len(batch), size):
            prompts = [encoder.prompt(one, length - new_tokens) for one in batch[start : start + size]]
            for ids in trained.model.generate(prompts, new_tokens, stop_tokens=(tokenizer.eos_id,)):
                yield {"answer": tokenizer.decode(ids).strip()}


def _rows_at_once(model: keras.Model, objective: TaskObjective, size: int) -> Callable[[list[Row]], Outputs]:
    """A function of any number of rows, which the model reads `size` at a time."""
    fields = objective.encoder.fields
    outputs = tf.function(lambda batch: objective.outputs(model, batch, training=False), autograph=False)

    def call(rows):
        parts = []
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            some = some + some[-1:] * (size - len(some))  # one shape, so that one program serves
            batch = {name: padded([np.asarray(row[name]) for row in some], field) for name, field in fields.items()}
            parts.append({name: x.numpy() for name, x in outputs(batch).items()})
        return {name: np.concatenate([part[name] for part in parts])[: len(rows)] for name in parts[0]}

    return call
