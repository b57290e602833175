"""What models are asked of a batch."""

from types import SimpleNamespace

import numpy as np
import tensorflow as tf

from flash_tf.training.objective import CausalObjective, MaskedObjective

TOKENIZER = SimpleNamespace(pad_id=0, mask_id=3, special_ids=(0, 1, 3, 4), vocabulary_size=50)
CONFIG = SimpleNamespace(train=SimpleNamespace(seed=0), masking=SimpleNamespace(rate=0.25, whole_words=False))
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
