"""The likelihood of documents."""

from types import SimpleNamespace

import numpy as np
import pytest
from keras import ops

from flash_tf.models.causal_lm import CausalLM
from flash_tf.scoring import score
from tests.backends import to_numpy

pytestmark = pytest.mark.one_backend
IDS, END, VOCABULARY = [7, 3, 9, 9, 12], 1, 20


def test_a_document_is_predicted_from_the_end_of_another_to_its_own_end():
    model = CausalLM(VOCABULARY, width=16, depth=1, mixer={"type": "flash", "chunk_size": 4, "key_dim": 8})
    tokenizer = SimpleNamespace(eos_id=END, encode=lambda texts: [np.array(IDS, np.int32) for _ in texts])
    (found,) = score(model, tokenizer, ["three small words"], context=8)
    logits = model(ops.convert_to_tensor([[END, *IDS]]))
    each = to_numpy(ops.log_softmax(logits))[0][np.arange(len(IDS) + 1), [*IDS, END]]
    assert found == {"log_likelihood": pytest.approx(each.sum(), rel=1e-5), "tokens": len(IDS) + 1, "words": 3}
