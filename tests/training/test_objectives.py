"""What models are asked of a batch."""

from types import SimpleNamespace

import numpy as np
import tensorflow as tf

from flash_tf.models import CausalLM
from flash_tf.training.objective import CausalObjective, MaskedObjective
from tests.numerics import FLOAT32, relative_error

TOKENIZER = SimpleNamespace(pad_id=0, mask_id=3, special_ids=(0, 1, 3, 4), vocabulary_size=50)
TRAIN = SimpleNamespace(seed=0, loss_implementation="auto")
CONFIG = SimpleNamespace(train=TRAIN, masking=SimpleNamespace(rate=0.25, whole_words=False))
TOKENS = tf.constant([[5, 6, 7, 8, 9, 10, 0, 0]])
SEGMENTS = tf.constant([[1, 1, 1, 2, 2, 2, 0, 0]])


def test_no_token_predicts_the_next_document_or_padding():
    objective = CausalObjective(CONFIG, TOKENIZER)
    _, options, labels, weights = objective.examples({"tokens": TOKENS, "segment_ids": SEGMENTS}, training=True)
    assert np.array_equal(weights, [[1, 1, 0, 1, 1, 0, 0]])
    assert np.array_equal(labels, TOKENS[:, 1:]) and np.array_equal(options["segment_ids"], SEGMENTS[:, :-1])
    *_, weights = objective.examples({"tokens": TOKENS}, training=True)
    assert np.array_equal(weights, [[1, 1, 1, 1, 1, 0, 0]])


def test_a_masked_model_knows_the_padding_of_an_evaluation_and_the_documents_of_a_row():
    objective = MaskedObjective(CONFIG, TOKENIZER)
    batch = {"tokens": TOKENS, "window": tf.constant([[0, 0]])}
    assert np.array_equal(objective.examples(batch, training=False).options["padding_mask"], TOKENS != 0)
    packed = objective.examples({**batch, "segment_ids": SEGMENTS}, training=True).options
    assert packed["padding_mask"] is None and np.array_equal(packed["segment_ids"], SEGMENTS)


def test_a_head_of_its_own_has_the_loss_of_its_logits_and_a_gradient():
    options = {"mixer": {"type": "self_attention", "heads": 2}, "tie_embeddings": False, "head_bias": False}
    model = CausalLM(50, width=8, depth=1, **options)
    model.build()
    model.embedding.reverse_embeddings.assign(np.random.default_rng(0).normal(size=(8, 50)))
    objective, batch = CausalObjective(CONFIG, TOKENIZER), {"tokens": TOKENS}
    with tf.GradientTape() as tape:
        loss, tokens = objective.loss(model, batch)
    found = objective(model, batch)
    want = np.sum(found.nll * found.weights)
    assert relative_error(loss, want) < FLOAT32 and tokens == 5
    gradient = tape.gradient(loss, model.embedding.reverse_embeddings.value)
    assert np.count_nonzero(gradient) == 8 * 50
