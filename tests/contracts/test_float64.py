"""Every mixer computes in float64 where it is asked to."""

import numpy as np
from keras import ops

from flash_tf.layers.mixers import MIXERS
from tests.backends import to_numpy
from tests.contracts.test_masks import D, every_mixer, randomized
from tests.contracts.test_mixers import defaults
from tests.numerics import FLOAT32, relative_error


@every_mixer
def test_a_layer_of_float64_is_the_layer_of_float32_with_fewer_roundings(kind, causal):
    options = {**defaults(MIXERS.get(kind)), "causal": causal}
    x = np.random.default_rng(0).normal(size=(2, 21, D))
    wide, narrow = (
        randomized(MIXERS.get(kind)(**options, dtype=dtype), [(None, None, D)]) for dtype in ("float64", "float32")
    )
    narrow.set_weights([to_numpy(weight.value) for weight in wide.weights])
    mask = ops.convert_to_tensor(np.arange(21)[None] < np.array([[21], [13]]))
    got = wide(ops.convert_to_tensor(x, "float64"), padding_mask=mask)
    want = narrow(ops.convert_to_tensor(x, "float32"), padding_mask=mask)
    assert "float64" in str(got.dtype)
    real = to_numpy(ops.cast(mask, "float32"))[..., None]
    assert relative_error(to_numpy(got) * real, to_numpy(want) * real) < FLOAT32
