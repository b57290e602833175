"""Causal attention over pairs leaves out most of those above the diagonal: the function must stay the same."""

import pytest

from kernels_xla import gau, softmax_attention
from kernels_xla.common import masks
from tests import numerics
from tests.backends import differentiate

CASES = [
    (softmax_attention, {}),
    *((gau, case) for case in ({}, {"divisor": "length"}, {"scale": "paper_appendix", "divisor": 32})),
]


@pytest.fixture(autouse=True)
def short_strips(monkeypatch):
    monkeypatch.setattr(masks, "UNIT", 8)
    for kernel in (softmax_attention, gau):
        monkeypatch.setattr(kernel, "STRIP", 8)


@pytest.mark.parametrize("layout", ["whole", "padded", "packed"])
@pytest.mark.parametrize("n", [32, 37, 33], ids=["four_strips", "a_shorter_last", "one_token_last"])
@pytest.mark.parametrize(("kernel", "case"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_strips_of_queries_change_neither_value_nor_gradients(layout, n, kernel, case):
    spec, case = kernel.SPEC, {"causal": True, **case}
    arrays, masked = numerics.inputs(spec, n=n), numerics.masks(layout, n=n)
    got = differentiate(spec.fast, case, arrays, masked)
    found = numerics.errors(got, differentiate(spec.reference, case, arrays, masked, "float64"))
    assert max(found.values()) < numerics.FLOAT32, found


@pytest.mark.parametrize("kernel", [softmax_attention, gau], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize(
    ("n", "causal", "taken"),
    [(32, True, 32 * 32 * 5 / 8), (16, True, 16 * 16 * 3 / 4), (15, True, 15 * 15), (32, False, 32 * 32)],
    ids=["four", "two", "one", "not_causal"],
)
def test_four_strips_leave_five_eighths_of_the_pairs(monkeypatch, kernel, n, causal, taken):
    pairs, attend = [], kernel.attend

    def counted(q, k, *rest):
        pairs.append(q.shape[0] * q.shape[1] * k.shape[1])
        return attend(q, k, *rest)

    monkeypatch.setattr(kernel, "attend", counted)
    differentiate(kernel.SPEC.fast, {"causal": causal}, numerics.inputs(kernel.SPEC, b=1, n=n))
    assert sum(pairs) == taken
