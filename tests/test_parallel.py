"""Mixers side by side against one projection of what they put out, and against wrong input."""

import numpy as np
import pytest
from keras import ops

from flash_tf.layers import Parallel
from tests.backends import to_numpy
from tests.contracts.test_mixers import TWO, B, D, N, built, normal, outputs
from tests.numerics import FLOAT32, relative_error


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_one_projection_of_the_concatenated_outputs(causal):
    layer, x = built(Parallel, {"mixers": list(TWO), "causal": causal}), normal(B, N, D)
    weights = [to_numpy(part.out_projection.kernel.value).astype("float64") for part in layer.parts]
    biases = [to_numpy(part.out_projection.bias.value).astype("float64") for part in layer.parts]
    found = outputs(layer, x)
    for part in layer.parts:  # from here on each puts out what it would project
        part.out_projection.kernel.assign(np.eye(D))
        part.out_projection.bias.assign(np.zeros(D))
    both = np.concatenate([outputs(part, x).astype("float64") for part in layer.parts], axis=-1)
    assert relative_error(found, both @ np.concatenate(weights) + sum(biases)) < FLOAT32


def test_its_state_is_that_of_its_mixers_with_one_position():
    layer = built(Parallel, {"mixers": [*TWO, {"type": "gau", "key_dim": 16}], "causal": True})
    state = layer.initial_state(B, capacity=N)
    alone = [part.initial_state(B, N if part.grows else None) for part in layer.parts]
    want = {f"mixer_{i}/{name}" for i, own in enumerate(alone) for name in own if name != "position"}
    assert set(state) == want | {"position"}
    assert [part.grows for part in layer.parts] == [False, False, True] and layer.grows
    size = 4 * sum(np.prod(x.shape) for x in state.values())
    assert layer.state_bytes(N, itemsize=4) == size / B


def test_documents_start_at_multiples_of_every_mixers():
    chunks = [{**TWO[0], "chunk_size": c} for c in (6, 4)]
    assert Parallel(chunks).align == 12


@pytest.mark.parametrize(
    ("mixers", "causal", "message"),
    [
        ([TWO[0]], True, "Parallel needs two mixers or more, got 1"),
        ([TWO[0], {"type": "diag"}], True, "no mixer is called 'diag'"),
        ([TWO[0], {"type": "retention"}], False, "Retention is causal by definition: it needs causal true, got False"),
        ([TWO[0], {"type": "skyformer"}], True, "Skyformer reads the whole text: it needs causal false, got True"),
        ([TWO[0], {**TWO[1], "causal": True}], True, "mixer 'linear_attention': the package sets causal itself"),
    ],
)
def test_what_it_cannot_be_is_said_in_a_line(mixers, causal, message):
    with pytest.raises(ValueError) as said:
        Parallel(mixers, causal=causal)
    assert message in str(said.value) and "\n" not in str(said.value)


def test_one_that_cannot_stream_stops_all():
    layer = Parallel([*TWO, {"type": "gau", "key_dim": 16, "divisor": "length"}], causal=True)
    layer.build((B, N, D))
    assert layer.state_bytes(N) is None
    with pytest.raises(ValueError, match="Parallel cannot stream: divisor 'length' is not known before the text ends"):
        layer.initial_state(B, capacity=N)
    assert layer(ops.ones((B, N, D))).shape == (B, N, D)
