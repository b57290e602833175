"""What rounding does to attention under one softmax over tokens and summaries."""

import numpy as np
import pytest

from kernels_xla.combiner.axial import SPEC, combiner_axial_attention
from kernels_xla.common.accelerator import tracing_for
from tests.backends import differentiate
from tests.numerics import BFLOAT16_LAYER, inputs, relative_error

CASE = {"chunk_size": 64, "causal": False}


def arrays(mean, **means):
    """Inputs of 300 tokens about a mean, rounded to bfloat16's eight bits so that both dtypes take the same."""
    given = {name: x + means.get(name, mean) for name, x in inputs(SPEC, b=1, n=300).items()}
    return {name: (x.astype("float32").view("uint32") & 0xFFFF0000).view("float32") for name, x in given.items()}


@pytest.mark.parametrize("accelerator", ["gpu", "tpu"])
def test_a_mean_of_keys_and_values_does_not_blur_the_gradient_of_queries(accelerator):
    given = arrays(3.0, q=0.0)
    exact = differentiate(combiner_axial_attention, CASE, given)
    with tracing_for(accelerator):
        rounded = differentiate(combiner_axial_attention, CASE, given, dtype="bfloat16")
    for name, expected in exact.items():
        assert relative_error(rounded[name], expected) < BFLOAT16_LAYER, name


def test_float16_has_room_for_values_of_hundreds():
    given = arrays(0.0, v=300.0, v_sum=300.0)
    for name, found in differentiate(combiner_axial_attention, CASE, given, dtype="float16").items():
        assert np.isfinite(found).all(), name
