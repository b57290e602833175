"""Mixers and models compute in float64 where they are asked to."""

import numpy as np
import pytest
from keras import ops

from flash_tf.layers.mixers import MIXERS
from tests import backends, tiers
from tests.backends import to_numpy
from tests.contracts.test_masks import D, randomized, some_mixers
from tests.contracts.test_mixers import defaults
from tests.contracts.test_models import EVERY, model_of, rows_of
from tests.numerics import FLOAT32, ROUNDED, relative_error

STEP = 1e-8


def rounding(function, x):
    """The second difference of a smooth function over a small step, which roundings leave, over its largest value."""
    along = np.random.default_rng(2).normal(size=x.shape)
    before, at, after = (to_numpy(function(ops.convert_to_tensor(x + s * STEP * along, "float64"))) for s in (-1, 0, 1))
    return np.max(np.abs(before - 2 * at + after)) / np.max(np.abs(at))


@some_mixers
def test_a_layer_of_float64_is_the_layer_of_float32_with_fewer_roundings(kind, causal):
    backends.seed(0)
    options = {**defaults(MIXERS.get(kind)), "causal": causal}
    x = np.random.default_rng(0).normal(size=(2, 21, D))
    wide, narrow = (
        randomized(MIXERS.get(kind)(**options, dtype=dtype), [(None, None, D)]) for dtype in ("float64", "float32")
    )
    narrow.set_weights([to_numpy(weight.value) for weight in wide.weights])
    mask = ops.convert_to_tensor(np.arange(21)[None] < np.array([[21], [13]]))
    real = to_numpy(ops.cast(mask, "float32"))[..., None]

    def exact(x):
        return wide(x, padding_mask=mask) * ops.convert_to_tensor(real, "float64")

    got = exact(ops.convert_to_tensor(x, "float64"))
    want = narrow(ops.convert_to_tensor(x, "float32"), padding_mask=mask)
    assert "float64" in str(got.dtype)
    assert relative_error(to_numpy(got), to_numpy(want) * real) < FLOAT32
    assert rounding(exact, x) < ROUNDED


@pytest.mark.parametrize("kind", tiers.thinned(EVERY, "causal_lm"))
def test_a_model_of_float64_rounds_nothing_to_float32(kind):
    model, ids = model_of(kind, dtype="float64", position_embedding="scaled_sin"), rows_of(kind)
    table = to_numpy(model.embedding.embeddings.value)

    def logits(table):
        model.embedding.embeddings.assign(table)
        return model(ids)

    assert "float64" in str(model(ids).dtype)
    assert rounding(logits, table) < ROUNDED
