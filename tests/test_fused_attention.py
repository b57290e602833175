"""Softmax attention where Keras has it in one kernel is the same function."""

import keras
import pytest

from kernels_xla import accelerator
from kernels_xla.softmax import SPEC, softmax_attention
from tests.backends import call, differentiate
from tests.numerics import FLOAT32, SIZES, inputs, masks, relative_error


@pytest.mark.parametrize("case", SPEC.cases, ids=str)
def test_keras_own_attention_is_ours_in_value_and_every_gradient(case, monkeypatch):
    arrays = inputs(SPEC, e=SIZES["s"])
    ours = differentiate(softmax_attention, case, arrays)
    monkeypatch.setattr(accelerator, "fuses_attention", lambda dtype: True)
    for name, fused in differentiate(softmax_attention, case, arrays).items():
        assert relative_error(fused, ours[name]) < FLOAT32, name


def test_masks_other_than_causal_are_not_left_to_it(monkeypatch):
    monkeypatch.setattr(accelerator, "fuses_attention", lambda dtype: True)
    monkeypatch.setattr(keras.ops, "dot_product_attention", None)  # whoever calls it, fails
    given = inputs(SPEC, e=SIZES["s"])
    for layout in ("padded", "packed"):
        call(softmax_attention, {"causal": True}, given, masks(layout))
    with pytest.raises(TypeError):
        call(softmax_attention, {"causal": True}, given)


def test_a_cpu_has_no_such_kernel():
    assert not any(accelerator.fuses_attention(dtype) for dtype in ("bfloat16", "float16", "float32"))
