"""Softmax attention where Keras has it in one kernel is the same function."""

import keras
import pytest

from kernels_xla.common import accelerator
from kernels_xla.softmax_attention import SPEC, softmax_attention
from tests.backends import call, differentiate
from tests.numerics import FLOAT32, SIZES, inputs, masks, relative_error
from tests.oracles import CASES


@pytest.mark.parametrize("case", CASES["softmax_attention"], ids=str)
def test_keras_own_attention_is_ours_in_value_and_every_gradient(case, monkeypatch):
    arrays = inputs(SPEC, e=SIZES["s"])
    ours = differentiate(softmax_attention, case, arrays)
    monkeypatch.setattr(accelerator, "fuses_attention", lambda width, dtype: True)
    for name, fused in differentiate(softmax_attention, case, arrays).items():
        assert relative_error(fused, ours[name]) < FLOAT32, name


def test_other_masks_and_wider_values_are_not_left_to_it(monkeypatch):
    monkeypatch.setattr(accelerator, "fuses_attention", lambda width, dtype: True)
    monkeypatch.setattr(keras.ops, "dot_product_attention", None)  # whoever calls it, fails
    given = inputs(SPEC, e=SIZES["s"])
    call(softmax_attention, {"causal": True}, inputs(SPEC))  # values wider than queries
    for layout in ("padded", "packed"):
        call(softmax_attention, {"causal": True}, given, masks(layout))
    with pytest.raises(TypeError):
        call(softmax_attention, {"causal": True}, given)


def test_a_cpu_has_no_such_kernel():
    assert not any(accelerator.fuses_attention(64, dtype) for dtype in ("bfloat16", "float16", "float32"))


def test_it_is_asked_of_a_gpu_for_what_cudnn_takes(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: ["gpu:0"])
    takes = [(width, dtype) for width in (12, 64, 128, 136) for dtype in ("bfloat16", "float16", "float32", "float64")]
    found = {case for case in takes if accelerator.fuses_attention(*case)}
    assert found == {(width, dtype) for width in (64, 128) for dtype in ("bfloat16", "float16")}
